"""Custom kinds for an objective's choices: base classes without torch (docs/guides/own-objective.md), and plugins.

Axes: S sequences, T tokens.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, Union, get_args

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, core_schema

from tepo_megatron.config.base import Section
from tepo_megatron.runtime.user_code import load_user_module

Need = Literal["reference", "teacher", "divergence", "entropy_slope", "entropy_gradient", "entropy_noise", "reward_parts"]
"""``reference``: log-probs of a frozen copy of the first weights. ``teacher``: those of a teacher. ``divergence``:
``TokenScores.divergence``. ``entropy_slope``: ``TokenScores.entropy_slope``. ``entropy_gradient``: a gradient through
``TokenScores.entropy``. ``entropy_noise``: measured rounding noise. ``reward_parts``: ``Batch.reward_parts_SK``.
"""


class NoiseBound(NamedTuple):
    """A bound without effect if the rounding noise is larger."""

    field: str
    value: float
    noise: Literal["entropy", "ratio", "token_ratio"]
    """``ratio``: at the level of ``objective.ratio``."""
    consequence: str
    """Ends a warning: the effect below the noise, and a remedy."""


class ObjectiveSection(Section):
    """By default a section needs no inputs, chooses no tokens and has no bounds."""

    selects_tokens: ClassVar[bool] = False

    @classmethod
    def kind_name(cls) -> str:
        return str(cls.model_fields["kind"].default)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def noise_bounds(self) -> tuple[NoiseBound, ...]:
        return ()

    @property
    def turning_points(self) -> tuple[float, ...]:
        """Distances of a token's log-ratio from 0 at which its push changes."""
        return ()


class CustomKind(ObjectiveSection):
    """Subclass one of the classes below, with ``kind: Literal["name"] = "name"``."""

    slot: ClassVar[str]  # the field below ``objective`` that accepts the kind

    kind: str
    """The kind's name."""

    @property
    def needs_reference(self) -> bool:
        """True if it reads ``values.reference_delta_T``, which needs a frozen copy of the first weights."""
        return False

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"reference"} if self.needs_reference else ())


class OwnAdvantage(CustomKind):
    """Turns rewards into advantages."""

    slot: ClassVar[str] = "advantage"

    @property
    def needs(self) -> frozenset[Need]:
        return super().needs | {"reward_parts"}

    @abstractmethod
    def advantages(self, batch: Any) -> Any:
        """Returns one advantage for each response of a whole rollout batch: float [S], finite, whatever the responses' order.

        ``batch``: `Batch` with ``rewards_S`` fp32, ``groups_S`` int64 (equal numbers make a group), ``loss_mask_T``, and
        ``reward_parts_SK`` if verifiers return the same components; a response without any has its reward in each. The result's
        gradient is dropped.
        """


class OwnRatio(CustomKind):
    """A level at which π_θ is compared with π_old."""

    slot: ClassVar[str] = "ratio"
    noise: ClassVar[str] = "ratio"

    @abstractmethod
    def log_ratio(self, values: Any) -> Any:
        """Log-ratio at every token of a micro-batch, [T], differentiable.

        ``values``: `TokenValues`; its ``delta_T`` is log π_θ − log π_old (bounded with ``log_clip``), 0 outside the loss mask.
        """


class OwnTrustRegion(CustomKind):
    """Bounds how far a ratio carries the surrogate."""

    slot: ClassVar[str] = "trust_region"

    @abstractmethod
    def surrogate(self, ratio_T: Any, values: Any) -> Any:
        """Value to maximise at each token of a micro-batch, [T], differentiable.

        ``ratio_T``: the value of ``objective.ratio``, [T]. ``values``: `TokenValues`; its ``advantage_T`` is the response's
        advantage at each of its tokens. A `Surrogate` also marks active bounds, for the metrics ``clip/low`` and ``clip/high``.
        """


class OwnAggregation(CustomKind):
    """Reduces token values to one number: a weight per token and a divisor."""

    slot: ClassVar[str] = "aggregation"

    def sequence_weights(self, lengths_S: Any) -> Any:
        """Weight of each response token of a sequence, [S]; 1 by default.

        ``lengths_S``: response tokens of a micro-batch's sequences, floating point, possibly 0.
        """
        return lengths_S * 0 + 1

    @abstractmethod
    def denominator(self, lengths_S: Any) -> Any:
        """Divisor of the sum over all micro-batches and ranks: a positive scalar.

        ``lengths_S``: as above, of the optimizer step on all ranks. Sequences of length 0 are padding and must change nothing.
        """


class OwnMismatch(CustomKind):
    """Weights for a sampler whose probabilities differ from the trainer's."""

    slot: ClassVar[str] = "mismatch"

    @abstractmethod
    def importance_weights(self, values: Any) -> Any:
        """Factor of the surrogate and of importance-weighted KL terms, [T]; its gradient is dropped.

        ``values``: `TokenValues`; its ``mismatch_T`` is log π_old − log π_sampler, 0 outside the loss mask.
        """


class _CustomTerm(CustomKind):
    def prepare(self, step: Any) -> Any:
        """Statistics of the whole optimizer step, passed to ``choose`` and ``penalty`` as ``prepared``.

        ``step``: `StepValues`, all response tokens of the step on every rank.
        """
        del step


class OwnMask(_CustomTerm):
    """Removes the surrogate's gradient, but not its value, at chosen tokens."""

    slot: ClassVar[str] = "mask"
    selects_tokens: ClassVar[bool] = True

    @abstractmethod
    def choose(self, values: Any, prepared: Any) -> Any:
        """Tokens of a micro-batch without gradient, bool [T]; those outside the loss mask are ignored.

        ``values``: `TokenValues`; ``prepared``: the result of ``prepare``.
        """


class OwnPenalty(_CustomTerm):
    """A term that is subtracted from the surrogate."""

    slot: ClassVar[str] = "penalty"

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.selects_tokens = cls.choose is not OwnPenalty.choose

    def choose(self, values: Any, prepared: Any) -> Any:
        """Penalised tokens of a micro-batch, bool [T]; every response token by default."""
        del values, prepared

    @abstractmethod
    def penalty(self, values: Any, prepared: Any) -> Any:
        """Penalty at each token of a micro-batch, [T], coefficient included, differentiable; finite everywhere.

        ``values``: `TokenValues`; ``prepared``: the result of ``prepare``. Only tokens of ``choose`` count.
        """


_BASES: tuple[type[CustomKind], ...] = (
    OwnAdvantage,
    OwnRatio,
    OwnTrustRegion,
    OwnAggregation,
    OwnMismatch,
    OwnMask,
    OwnPenalty,
)


@dataclass(frozen=True)
class Plugin:
    name: str  # absolute path of its file, or module name

    digest: str  # of the imported bytes

    kinds: tuple[type[CustomKind], ...]  # in order of definition

    @classmethod
    def load(cls, name: str) -> Self:
        """Imports ``path/file.py`` or a module. Raises ValueError if that fails, or a kind is missing or incomplete."""
        where = f"objective.plugins: {name}"
        loaded = load_user_module(name, "objective.plugins")
        classes = [value for value in vars(loaded.module).values() if isinstance(value, type) and issubclass(value, CustomKind)]
        kinds = tuple(
            kind
            for kind in dict.fromkeys(classes)
            if not kind.__module__.startswith("tepo_megatron.") and not kind.__name__.startswith("_")  # _: the user's own base
        )
        if not kinds:
            bases = ", ".join(base.__name__ for base in _BASES)
            raise ValueError(f"{where} defines no kind; a kind is a subclass of one of {bases} (docs/guides/own-objective.md)")
        for kind in kinds:
            _check_kind(kind, where)
        return cls(loaded.place, loaded.digest, kinds)


def _check_kind(kind: type[CustomKind], where: str) -> None:
    base = next((base for base in _BASES if issubclass(kind, base)), None)
    if base is None:
        raise ValueError(f"{where}: {kind.__name__} has to be a subclass of OwnRatio, OwnTrustRegion or another of their like")
    allowed = get_args(kind.model_fields["kind"].annotation)
    if len(allowed) != 1 or allowed[0] != kind.model_fields["kind"].default or not str(allowed[0]).isidentifier():
        raise ValueError(
            f"{where}: {kind.__name__} does not say what it is called; give it a field such as "
            f'kind: Literal["{kind.__name__.lower()}"] = "{kind.__name__.lower()}"'
        )
    if missing := sorted(kind.__abstractmethods__):
        raise ValueError(f"{where}: {kind.__name__} has no method {missing[0]}, which a subclass of {base.__name__} defines")


_BUILTIN: dict[str, tuple[type[ObjectiveSection], ...]] = {}


@dataclass(frozen=True)
class CustomSlot:
    """Annotates a field below ``objective`` that also accepts custom kinds."""

    slot: str

    def kinds(self, plugins: Sequence[str]) -> tuple[type[ObjectiveSection], ...]:
        """With the built-in ones. Raises ValueError if two have one name."""
        owned = [("the package", kind) for kind in _BUILTIN[self.slot]]
        owned += [(item.name, kind) for item in map(Plugin.load, plugins) for kind in item.kinds if kind.slot == self.slot]
        owners: dict[str, str] = {}
        for owner, kind in owned:
            name = kind.kind_name()
            if name in owners:
                both = f"{owner} and {owners[name]} both have a kind {name!r} of objective.{self.slot}"
                raise ValueError(f"objective.plugins: {both}; rename one")
            owners[name] = owner
        return tuple(kind for _, kind in owned)

    @classmethod
    def schemas(cls, plugins: Sequence[str], generator: type[GenerateJsonSchema]) -> dict[str, Any]:
        """JSON schemas, with ``$defs``, of the fields with kinds of these plugins."""
        schemas: dict[str, Any] = {"$defs": {}}
        for slot, builtin in _BUILTIN.items():
            kinds = cls(slot).kinds(plugins)
            if kinds != builtin:
                node = _adapter(kinds).json_schema(ref_template=f"#/$defs/{slot}.{{model}}", schema_generator=generator)
                schemas["$defs"] |= {f"{slot}.{name}": definition for name, definition in node.pop("$defs", {}).items()}
                schemas[slot] = node
        return schemas

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = [member for member in (get_args(source) or (source,)) if not issubclass(member, CustomKind)]
        _BUILTIN[self.slot] = tuple(members)
        builtin = handler.generate_schema(_union(*members)) if members else core_schema.any_schema()

        def validate(value: Any, validate_builtin: Any, info: Any) -> Any:
            if isinstance(value, CustomKind):
                if value.slot != self.slot:
                    raise ValueError(
                        f"{type(value).__name__} is a kind of objective.{value.slot}, not of objective.{self.slot}"
                    )
                return value
            kinds = self.kinds(info.data.get("plugins", ()))
            if len(kinds) > len(members):
                return _adapter(kinds).validate_python(value)
            if not members:
                raise ValueError(
                    "there are no kinds of it but those of plugins; name one in objective.plugins that defines a subclass of "
                    f"{source.__name__}"
                )
            return validate_builtin(value)

        by_its_class = core_schema.simple_ser_schema("any")
        return core_schema.with_info_wrap_validator_function(validate, builtin, serialization=by_its_class)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(handler(schema["schema"])) or {"type": "object", "additionalProperties": False}


@cache
def _adapter(kinds: tuple[type[ObjectiveSection], ...]) -> TypeAdapter[Any]:
    return TypeAdapter(_union(*kinds))


def _union(*members: type) -> Any:
    return Annotated[Union[members], Field(discriminator="kind")] if len(members) > 1 else members[0]  # noqa: UP007
