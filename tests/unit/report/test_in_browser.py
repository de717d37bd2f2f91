"""Reports in a real headless Chromium: drawn without a problem, read by keys, filtered, loaded anew; nothing in them runs."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tepo_megatron.run.metrics import read_metrics, read_tokens, token_file
from tepo_megatron.tools.bench.chromium import NAMES, chromium
from tepo_megatron.tools.report import runs, write_report
from tepo_megatron.tools.sweep import Spread, area, points
from tests.support.report_runs import HOSTILE, PHASES, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no Chromium is installed (Debian: apt-get install chromium)"),
]
TABS = ("overview", "curves", "compare", "time", "settings", "faults", "samples")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as page:
        yield page


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The tab, which must have met no problem at the end of the test and have asked for nothing but its own file."""
    browser.problems.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    yield browser
    assert browser.problems == []
    assert {url.partition("#")[0].rpartition("/")[2] for url in browser.requests} <= {"page.html", "about:blank"}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one kind, of which the first has tokens and a hostile response, and a run of other settings."""
    folder = tmp_path_factory.mktemp("report")
    write_run(folder / "runs" / "tepo-seed0", steps=70, recorded=(10, 30, 70), hostile=True)
    write_run(folder / "runs" / "tepo-seed1", steps=70, seed=1)
    write_run(folder / "runs" / "grpo-seed0", steps=40, seed=2, settings={"optimizer": {"lr": 1e-4}})
    write_report([folder / "runs"], folder / "page.html")
    return folder / "page.html"


def texts(page: Any, selector: str) -> list[str]:
    return list(page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)"))


def set_field(page: Any, selector: str, value: str) -> None:
    setting = f"field.value = {json.dumps(value)}; "
    setting += "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind));"
    page.evaluate(f"(field => {{ {setting} }})(document.querySelector({json.dumps(selector)}))")


def press(page: Any, key: str) -> None:
    text = {"text": key} if len(key) == 1 else {}
    page.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
    page.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)


def tip(page: Any) -> str:
    return str(page.evaluate("document.getElementById('tip').innerText"))


def strengths(page: Any) -> list[float]:
    """How strong the colour of each token of the first response is, 0 for none."""
    opacity = "Number(each.style.backgroundColor.match(/, ([\\d.]+)\\)$/)?.[1] ?? 0)"
    return list(page.evaluate(f"[...document.querySelectorAll('.response:first-child .token')].map(each => {opacity})"))


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_every_tab_is_drawn_in_both_themes_and_on_a_phone(width: int, height: int, page: Any, html: Path) -> None:
    for dark in (False, True):
        page.resize(width, height, dark=dark)
        for tab in TABS:
            page.open(html, f"tab={tab}")
            assert page.evaluate("document.body.dataset.failed") is None
            assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
            assert len(page.evaluate("document.getElementById('main').innerText")) > 200, tab
            assert page.evaluate("document.documentElement.scrollWidth") <= width, tab


def test_what_a_model_wrote_is_shown_and_not_run(page: Any, html: Path) -> None:
    for kind in ("heldout", "tokens"):
        page.open(html, f"tab=samples&kind={kind}&words=onerror")
        page.wait_for("document.querySelectorAll('.response').length")
        assert HOSTILE in texts(page, ".prompt-box")
        assert any(HOSTILE in text for text in texts(page, ".response .text"))
        assert page.evaluate("typeof window.attacked") == "undefined"
        assert page.evaluate("document.images.length") == 0
        assert page.evaluate("document.scripts.length") == 3
    # The policy is a wall of its own: what would be put into the page as HTML does not run either.
    page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(HOSTILE)})")
    page.wait_for("document.images.length")
    assert page.evaluate("new Promise(done => setTimeout(() => done(typeof window.attacked), 50))") == "undefined"
    assert page.problems
    page.problems.clear()
    page.requests.clear()


def test_a_curve_is_read_by_mouse_and_keys_and_zoomed(page: Any, html: Path) -> None:
    page.open(html, "tab=curves&find=entropy/mean&smooth=0&by=each")
    chart = '[data-chart="entropy/mean"] svg'
    page.wait_for(f"document.querySelectorAll('{chart.replace(chr(34), chr(92) + chr(34))} path').length")
    box = f"document.querySelector({json.dumps(chart)}).getBoundingClientRect()"
    x, y = page.evaluate(f"(b => [b.left + 0.5 * b.width, b.top + b.height / 2])({box})")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert all(text in tip(page) for text in ("entropy/mean · step", "tepo-seed0", "tepo-seed1", "grpo-seed0"))
    page.evaluate(f"document.querySelector({json.dumps(chart)}).focus()")
    press(page, "Home")
    row = read_metrics(html.parent / "runs" / "tepo-seed0" / "metrics.jsonl")[1]
    assert all(text in tip(page) for text in ("step 1", f"{row['entropy/mean']:.4g}"))
    press(page, "Escape")
    assert page.evaluate("document.getElementById('tip').hidden")
    page.evaluate("zoomTo(10, 20)")
    assert page.evaluate("charts.values().next().value.low") == 10
    press(page, "Escape")
    assert page.evaluate("drawing.from") is None


def test_seeds_are_drawn_together_and_by_a_settings_value(page: Any, html: Path) -> None:
    page.open(html, "tab=curves&find=reward/mean")
    assert page.evaluate("linesOf('reward/mean').map(line => line.label)") == ["grpo-seed0", "tepo (2)"]
    line = page.evaluate("linesOf('reward/mean')[1]")
    paths = (html.parent / "runs").glob("tepo-*/metrics.jsonl")
    values = [dict(points(read_metrics(path), "reward/mean"))[37] for path in paths]
    drawn = [line[name][line["x"].index(37)] for name in ("low", "y", "high")]
    np.testing.assert_allclose(drawn, [min(values), float(np.mean(values)), max(values)], rtol=1e-5)
    set_field(page, ".tools select", "optimizer.lr")
    assert sorted(page.evaluate("compared().map(each => each.label)")) == ["optimizer.lr 0.0001", "optimizer.lr 5e-05"]
    assert "by=optimizer.lr" in page.evaluate("location.hash")
    page.evaluate("document.querySelector('.chip').click()")
    assert page.evaluate("compared().length") == 1


def test_seeds_of_different_lengths_share_a_clock_and_a_mean_step(page: Any, tmp_path: Path) -> None:
    """A slow one that stopped early, one that went on, and one that has only its first evaluation; each repeated steps."""
    steps_of, phases_of = [], []
    for seed, steps, slower in ((0, 40, 10), (1, 80, 1), (2, 0, 1)):
        path = write_run(tmp_path / "runs" / f"tepo-seed{seed}", steps=steps, seed=seed) / "metrics.jsonl"
        rows = [{name: value * slower ** name.startswith("time/") for name, value in row.items()} for row in read_metrics(path)]
        rows[steps // 2] |= {"lost/rollback": 50.0, "lost/resume": 7.0}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        steps_of.append(np.array([row["time/step"] for row in rows]))
        phases_of.append(np.array([sum(row[name] for name in row if name.removeprefix("time/") in PHASES) for row in rows]))
    write_report([tmp_path / "runs"], tmp_path / "page.html")
    page.open(tmp_path / "page.html", "tab=time&time=1")
    assert f"{np.mean([seconds[1:].mean() for seconds in phases_of[:2]]):.1f} s" in texts(page, "tbody tr:first-child td")
    slow, fast = steps_of[:2]
    for metric in ("accuracy/greedy", "entropy/mean"):
        line = page.evaluate(f"linesOf('{metric}')[0]")
        assert line["x"] == sorted(line["x"])
        clocks = np.cumsum(np.pad(slow, (0, 40), constant_values=slow[1:].mean())), np.cumsum(fast)
        lost = [57.0 * (np.arange(81) >= number) for number in (20, 40)]
        np.testing.assert_allclose(line["x"], np.mean([*clocks, *lost], axis=0) / 1800, rtol=1e-5)


def spread_of(found: dict[str, float]) -> list[float]:
    return [found["mean"], found["low"], found["high"]]


def test_one_kind_stands_beside_another_seed_by_seed(page: Any, tmp_path: Path) -> None:
    """Two seeds are in both kinds, and of one of those a run is shorter: what the other did later does not count."""
    for seed in (0, 1, 2):
        write_run(tmp_path / "runs" / f"tepo-seed{seed}", steps=40 if seed == 2 else 70, seed=seed)
    for seed in (1, 2, 3):
        settings = {"seed": seed, "optimizer": {"lr": 1e-4}}
        write_run(tmp_path / "runs" / f"grpo-seed{seed}", steps=70, seed=100 + seed, settings=settings)
    write_report([tmp_path / "runs"], tmp_path / "page.html")
    page.open(tmp_path / "page.html", "tab=compare&beside=tepo&figure=kl/mean")
    found = dict(page.evaluate("comparedFigures().map(figure => [figure.name, against(figure, pairsOf(...compared()))])"))

    def values(metric: str, figure: Callable[[list[tuple[int, float]]], float]) -> Iterator[list[float]]:
        for seed, steps in ((1, 70), (2, 40)):
            paths = (tmp_path / "runs" / f"{name}-seed{seed}" / "metrics.jsonl" for name in ("grpo", "tepo"))
            yield [figure(points(read_metrics(path)[: steps + 1], metric)) for path in paths]

    areas = [a - b for a, b in values("accuracy/greedy", lambda curve: area(curve) or 0.0)]
    lasts = [a - b for a, b in values("kl/mean", lambda curve: curve[-1][1])]
    ratios = [math.log(a / b) for a, b in values("grad_norm", lambda curve: float(np.mean([y for _, y in curve[-10:]])))]
    for name, differences, shown in (("area", areas, np.array), ("kl/mean", lasts, np.array), ("grad norm", ratios, np.exp)):
        spread = Spread(tuple(differences))
        expected = shown([spread.mean, spread.mean - spread.half_width, spread.mean + spread.half_width])
        np.testing.assert_allclose(spread_of(found[name]), expected, rtol=1e-3, atol=1e-9 if name == "kl/mean" else 1e-5)
    assert {each["n"] for each in found.values()} <= {0, 2}
    assert len(texts(page, '[data-table="against"] tbody tr')) == 1
    assert texts(page, '[data-table="against"] tbody tr td')[0] == "2"
    assert [text[-1] for text in texts(page, '[data-table="own"] tbody tr td:nth-child(2)')] == ["3", "3"]
    # By the value of a setting the pairs agree in all others that differ; here that is the seed again.
    set_field(page, ".tools select", "optimizer.lr")
    names = page.evaluate("pairsOf(...compared()).map(pair => pair.map(run => run.name)).flat().sort()")
    assert names == ["grpo-seed1", "grpo-seed2", "tepo-seed1", "tepo-seed2"]
    set_field(page, ".tools select", "each")
    page.evaluate("document.querySelectorAll('.chip').forEach((chip, at) => { if (at) chip.click(); })")
    assert "nothing here to compare" in page.evaluate("document.getElementById('main').innerText")


def test_accuracies_of_other_samples_are_not_compared(page: Any, tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"four-seed{seed}", steps=30, seed=seed)
        settings = {"seed": seed, "evaluate": {"samples": 8}}
        path = write_run(tmp_path / "runs" / f"eight-seed{seed}", steps=30, seed=seed, settings=settings) / "metrics.jsonl"
        path.write_text(path.read_text().replace("@4", "@8"))
    write_report([tmp_path / "runs"], tmp_path / "page.html")
    page.open(tmp_path / "page.html", "tab=compare")
    counts = dict(page.evaluate("comparedFigures().map(figure => [figure.name, against(figure, pairsOf(...compared())).n])"))
    assert {name: n for name, n in counts.items() if "@" in name} == {"avg@4": 0, "avg@8": 0, "pass@4": 0, "pass@8": 0}
    assert counts["greedy"] == 2


def test_a_run_that_never_got_there_counts_with_its_last_step_and_is_said(page: Any, html: Path) -> None:
    page.open(html, "tab=compare")
    ratio = "against({value: run => run.at, ratio: true, reached: true}, %s)"

    def beside(at: list[int | None], other: list[int | None]) -> dict[str, Any]:
        pairs = [[{"at": a, "x": [0, 60]}, {"at": b, "x": [0, 60]}] for a, b in zip(at, other, strict=True)]
        return dict(page.evaluate(ratio % json.dumps(pairs)))

    later = beside([None] * 6, [30] * 6)
    assert (later["n"], later["never"], later["theirs"], later["differs"]) == (6, 6, 0, True)
    np.testing.assert_allclose(spread_of(later), [2, 2, 2])
    assert beside([20] * 6, [None] * 6)["differs"]
    assert beside([19, 20, 21], [None] * 3)["differs"]
    for pairs in (2, 5):  # without spread
        assert not beside([20] * pairs, [None] * pairs)["differs"]
    rounded = "against({value: run => run.at}, [[{at: 0.3}, {at: 0.1}], [{at: 0.5}, {at: 0.3}]]).differs"
    assert not page.evaluate(rounded)
    assert beside([None, None], [None, None])["n"] == 0
    mixed, alone = beside([50, 50, 40], [25, 25, None]), beside([50], [25])
    assert (mixed["theirs"], mixed["never"]) == (1, 0)
    assert (alone["mean"], alone["low"], alone["differs"]) == (2, None, False)


def test_filters_leave_what_they_say(page: Any, html: Path) -> None:
    page.open(html, "tab=samples&kind=tokens")
    groups = page.evaluate("finder.shown.length")
    assert groups == 12
    set_field(page, '[aria-label="reward, most"]', "0")
    shown = page.evaluate("finder.shown.map(group => group.responses.map(response => response.reward))")
    assert 0 < len(shown) <= groups
    assert all(0 in rewards for rewards in shown)
    page.evaluate("choose(finder.shown.findIndex(group => group.mixed))")
    rewards = page.evaluate("finder.shown[finder.at].responses.map(response => response.reward)")
    assert page.evaluate("[...document.querySelectorAll('.response')].map(each => each.classList.contains('out'))") == [
        bool(each) for each in rewards
    ]
    set_field(page, '[aria-label="reward, most"]', "")
    set_field(page, ".tools select[data-name=step]", "30")
    assert set(page.evaluate("finder.shown.map(group => group.step)")) == {30}
    set_field(page, '[aria-label="tokens, least"]', "999")
    assert "No sample passes" in page.evaluate("document.querySelector('.detail').innerText")


def test_tokens_have_the_colours_and_values_of_the_run(page: Any, html: Path) -> None:
    page.open(html, "tab=samples&kind=tokens&step=30&sort=first")
    samples = read_tokens(token_file(html.parent / "runs" / "tepo-seed0", 30))
    page.evaluate("choose(1)")
    there = samples.tokens_of(8)  # the first response of the second group
    assert texts(page, ".response:first-child .token") == [samples.pieces[each] for each in samples.ids[there].tolist()]
    drawn = strengths(page)
    logprobs = samples.logprob_sampler[there]
    assert int(np.argmax(drawn)) == int(np.argmin(logprobs))
    assert drawn[int(np.argmax(logprobs))] < 0.4 < max(drawn)
    page.evaluate("document.querySelector('.response .text').focus()")
    press(page, "ArrowRight")
    press(page, "ArrowRight")
    values = dict(line.replace("\t−", "\t-").rsplit("\t", 1) for line in tip(page).splitlines() if "\t" in line)
    gap = (samples.logprob_trainer - samples.logprob_sampler)[there][1]
    shown = [float(values[name]) for name in ("token", "entropy", "trainer − sampler")]
    assert shown == pytest.approx([2, samples.entropy[there][1], gap], rel=0.01)
    page.evaluate("document.activeElement.blur()")
    seen = [page.evaluate("colouring()")]
    while seen[-1] != "none":
        press(page, "c")
        seen.append(page.evaluate("colouring()"))
        if seen[-1] == "masked":
            marked = np.array(strengths(page)) > 0
            assert marked.tolist() == samples.masked[there].tolist()
    assert len(seen) == 11
    press(page, "j")
    assert page.evaluate("finder.at") == 2


def test_an_open_page_follows_the_run_and_stays_as_it_is(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_status", lambda folder, **_: (["made up: so it stands"], True))
    folder, path = write_run(tmp_path / "run", steps=40, recorded=(10, 20)), tmp_path / "page.html"
    write_report([folder], path, refresh=2, title="before")
    page.open(path, "tab=samples&kind=tokens&colour=entropy&paused=1")
    page.evaluate("choose(5)")
    chosen = page.evaluate("keyOf(finder.shown[finder.at])")
    write_run(folder, steps=41, recorded=(30,))  # newer groups come before it
    write_report([folder], path, refresh=3600, title="after")
    page.evaluate("document.querySelector('.state .button').click()")  # no longer paused
    page.wait_for("document.querySelector('h1')?.textContent === 'after' && document.body.dataset.ready")
    assert page.evaluate("keyOf(finder.shown[finder.at])") == chosen
    assert page.evaluate("finder.at") != 5
    assert page.evaluate("colouring()") == "entropy"
    assert "1 running" in texts(page, ".bar .state span.good")[0]


def test_samples_that_do_not_fit_are_not_called_missing(page: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, groups=1, recorded=(2,))
    tokens, text = "8 responses are recorded (training, token by token)", "40 responses are recorded (held out)"
    limits: list[dict[str, Any]] = [{"megabytes": 0.001}, {"most_samples": 0}]
    for options, starts in zip(limits, ([tokens], [tokens, text]), strict=True):
        path = tmp_path / str(len(starts)) / "page.html"
        write_report([folder], path, **options)
        page.open(path, "tab=samples")
        assert texts(page, ".hint") == [f"{start}, none fits: raise --size or --samples." for start in starts]
        assert "No sample yet" not in page.evaluate("document.body.innerText")


def test_of_3000_samples_only_those_in_sight_are_drawn(page: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recorded=range(1, 91), groups=5)
    written = write_report([folder], tmp_path / "page.html")
    page.open(tmp_path / "page.html", "tab=samples")
    assert page.evaluate("SAMPLES.groups.reduce((sum, group) => sum + group.responses.length, 0)") == written.samples == 3160
    assert 0 < page.evaluate("document.querySelectorAll('.entry').length") < 60  # of 407
