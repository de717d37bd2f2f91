"""Plugins: modules of the user's with kinds of their own, and the fields of an objective that take them. No torch.

A plugin is imported when an objective names it, and never otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema

from tepo_megatron.config.objective.custom import OWN_KINDS, OwnKind
from tepo_megatron.runtime.user_code import load_user_module, locate_user_module


@dataclass(frozen=True)
class Plugin:
    """A module of the user's, as it was imported."""

    name: str
    """The absolute path of its file, or the module's name."""

    digest: str
    """Of the bytes that were imported."""

    kinds: tuple[type[OwnKind], ...]
    """Its kinds, in the order in which they are defined."""


def load_plugin(name: str) -> Plugin:
    """Imports a plugin, unless these bytes of it have been imported before; ``name``: ``path/file.py`` or a module's name.

    Raises:
        ValueError: it cannot be imported, defines no kind, or a kind of it is not whole.
    """
    where = f"objective.plugins: {name}"
    place = locate_user_module(name, "objective.plugins")
    loaded = load_user_module(place, "objective.plugins")
    found = [value for value in vars(loaded.module).values() if isinstance(value, type) and issubclass(value, OwnKind)]
    kinds = tuple(dict.fromkeys(kind for kind in found if not kind.__module__.startswith("tepo_megatron.")))
    kinds = tuple(kind for kind in kinds if not kind.__name__.startswith("_"))  # a base of its own
    if not kinds:
        bases = ", ".join(base.__name__ for base in OWN_KINDS)
        raise ValueError(f"{where} defines no kind; a kind is a subclass of one of {bases} (docs/guides/own-objective.md)")
    for kind in kinds:
        _check_kind(kind, where)
    return Plugin(place, loaded.digest, kinds)


def name_of(kind: type[OwnKind]) -> str:
    """What the configuration calls a kind."""
    return str(kind.model_fields["kind"].default)


def own_kinds(plugins: Sequence[str], slot: str | None = None) -> tuple[type[OwnKind], ...]:
    """The kinds of these plugins, of one field below ``objective`` or of all.

    Raises:
        ValueError: as :func:`load_plugin`; or two kinds of one field have the same name.
    """
    found: dict[tuple[str, str], tuple[str, type[OwnKind]]] = {}
    for plugin in map(load_plugin, plugins):
        for kind in plugin.kinds:
            key = (kind.slot, name_of(kind))
            if key in found:
                raise ValueError(
                    f"objective.plugins: {found[key][0]} and {plugin.name} both have a kind {key[1]!r} of objective.{key[0]}; "
                    "rename one"
                )
            found[key] = (plugin.name, kind)
    return tuple(kind for _, kind in found.values() if slot in (None, kind.slot))


def _check_kind(kind: type[OwnKind], where: str) -> None:
    if kind in OWN_KINDS or not hasattr(kind, "slot"):
        raise ValueError(f"{where}: {kind.__name__} has to be a subclass of OwnRatio, OwnTrustRegion or another of their like")
    allowed = get_args(kind.model_fields["kind"].annotation)
    if len(allowed) != 1 or allowed[0] != kind.model_fields["kind"].default or not str(allowed[0]).isidentifier():
        raise ValueError(
            f"{where}: {kind.__name__} does not say what it is called; give it a field such as "
            f'kind: Literal["{kind.__name__.lower()}"] = "{kind.__name__.lower()}"'
        )
    base = next(base for base in OWN_KINDS if issubclass(kind, base))
    if getattr(kind, base.defines) is getattr(base, base.defines):
        raise ValueError(f"{where}: {kind.__name__} has no method {base.defines}, which a subclass of {base.__name__} defines")


@dataclass(frozen=True)
class OwnSlot:
    """Marks a field below ``objective`` whose value may be a section of the user's own beside those of the union."""

    slot: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [each for each in (get_args(source) or (source,)) if not issubclass(each, OwnKind)]
        usual = handler.generate_schema(_union(members)) if members else core_schema.any_schema()

        def validate(value: Any, usually: Any, info: Any) -> Any:
            if isinstance(value, OwnKind):
                if value.slot != self.slot:
                    raise ValueError(
                        f"{type(value).__name__} is a kind of objective.{value.slot}, not of objective.{self.slot}"
                    )
                return value
            own = own_kinds(info.data.get("plugins", ()), self.slot)
            if own:
                return _adapter((*members, *own), self.slot).validate_python(value)
            if not members:
                raise ValueError(
                    "there are no kinds of it but those of plugins; name one in objective.plugins that defines a subclass of "
                    f"{source.__name__}"
                )
            return usually(value)

        def serialize(value: Any, usually: Any, info: Any) -> Any:
            if isinstance(value, OwnKind):
                return value.model_dump(mode=info.mode, exclude_none=info.exclude_none)
            return usually(value)

        return core_schema.with_info_wrap_validator_function(
            validate,
            usual,
            serialization=core_schema.wrap_serializer_function_ser_schema(serialize, info_arg=True, schema=usual),
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Without plugins; `schema_with` adds their kinds."""
        usual = handler(schema["schema"])
        return dict(usual) or {"type": "object", "additionalProperties": False}


def schema_with(plugins: Sequence[str], slots: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """JSON schemas, by field, of the fields below ``objective`` for which these plugins have kinds, and under ``$defs`` what
    they refer to. ``slots``: the usual sections of each field."""
    made: dict[str, Any] = {"$defs": {}}
    for slot, members in slots.items():
        own = own_kinds(plugins, slot)
        if own:
            node = _adapter((*members, *own), slot).json_schema(ref_template=f"#/$defs/{slot}.{{model}}")
            made["$defs"] |= {f"{slot}.{name}": each for name, each in node.pop("$defs", {}).items()}
            made[slot] = node
    return made


@cache
def _adapter(members: tuple[type, ...], slot: str) -> TypeAdapter[Any]:
    names = [str(member.model_fields["kind"].default) for member in members]  # type: ignore[attr-defined]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"objective.plugins: {name!r} is a kind of objective.{slot} already; rename yours")
    return TypeAdapter(_union(list(members)))


def _union(members: list[type]) -> Any:
    """Sections told apart by ``kind``; a single one needs no telling."""
    return Annotated[Union[tuple(members)], Field(discriminator="kind")] if len(members) > 1 else members[0]  # noqa: UP007
