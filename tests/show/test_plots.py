import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline

from simrl.analysis.explanation import diff_results, explain_result
from simrl.analysis.gpu_hours import PARTS, waterfall
from simrl.errors import InputError
from simrl.result.metrics import gpu_seconds, summary, window
from simrl.result.result import Result, read_result
from simrl.result.timeline import steady_window
from simrl.scenario.model import Scenario
from simrl.show.figures.compare import (
    bubble_figure,
    comparison_figure,
    gpu_seconds_figure,
    staleness_figure,
)
from simrl.show.figures.explain import difference_figure, explanation_figure
from simrl.show.figures.one_run import run_figures
from simrl.show.figures.sweep import sweep_figure
from simrl.show.figures.timeline import kind_words, timeline_figure
from simrl.show.style import INK, KINDS, LOOKS, SERIES, save
from simrl.simulate.run import simulate

Run = Callable[..., Result]
HAIR = 0.01  # inches


def rectangles(axes: Axes) -> dict[str, np.ndarray]:
    """By kind, (left, right, height) of each rectangle of a panel of lanes, in seconds and lanes."""
    found = {}
    for patch in axes.findobj(PathPatch):
        corners = patch.get_path().vertices.reshape(-1, 5, 2)
        assert (patch.get_path().codes.reshape(-1, 5)[:, -1] == Outline.CLOSEPOLY).all()
        found[patch.get_label()] = np.stack(
            [corners[:, 0, 0], corners[:, 1, 0], np.ptp(corners[:, :4, 1], axis=1)], axis=1
        )
    return found


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))


@pytest.mark.parametrize("system", ["verl_colocated", "split", "one_step_off", "areal"])
def test_the_area_of_each_kind_is_its_share_of_gpu_time(small_run: Run, system: str) -> None:
    result = small_run(system)
    window = steady_window(result)
    figure = timeline_figure(result, window)
    gpu_s = gpu_seconds(result, window.start_s, window.end_s)
    panels = (
        {True: figure.axes[0]}
        if system == "verl_colocated"
        else {True: figure.axes[0], False: figure.axes[1]}
    )
    for rolls, panel in panels.items():
        drawn = {kind: (r[:, 1] - r[:, 0]) @ r[:, 2] for kind, r in rectangles(panel).items()}
        total = sum(s for (on, _), s in gpu_s.items() if on == rolls)
        for (on, kind), seconds in gpu_s.items():
            if on == rolls:
                assert drawn.get(kind, 0.0) / sum(drawn.values()) == pytest.approx(seconds / total)


def test_the_timeline_says_the_idle_share_of_the_time_shown_and_the_bubble_of_the_run(
    small_run: Run,
) -> None:
    result = small_run("one_step_off")
    window = steady_window(result)
    words = texts(timeline_figure(result, window))
    gpu_s = gpu_seconds(result, window.start_s, window.end_s)
    idle = gpu_s[True, "idle"] / sum(s for (rolls, _), s in gpu_s.items() if rolls)
    assert f"idle (bubble)\nrollout GPUs {idle:.1%}, trainer " in words
    row = summary(result, 2)
    assert (
        f"rollout bubble {row['rollout_bubble']:.1%}, trainer idle {row['train_idle']:.1%}" in words
    )
    assert "one_step_off, cluster.gpus=8" in words
    assert "qwen3-0.6b on 8 h100: 6 rollout workers of 1 GPU, 2 train GPUs" in words


def test_policy_updates_are_lines_where_they_end_with_their_step(small_run: Run) -> None:
    result = small_run("areal")
    figure = timeline_figure(result, steady_window(result, 2, first_step=3))
    finished_s = result.steps.column("finished_s").to_pylist()
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == finished_s[2:5]
    assert "end of step 2\nend of step 3\nend of step 4" in texts(figure)
    assert figure.axes[-1].get_xlim() == (finished_s[2], finished_s[4])


def test_a_colocated_system_has_no_trainer_lane_and_shows_training_on_the_workers(
    small_run: Run,
) -> None:
    result = small_run("verl_colocated")
    figure = timeline_figure(result, steady_window(result))
    assert len(figure.axes) == 3
    assert {"rollout", "train", "switch", "idle"} <= set(rectangles(figure.axes[0]))
    assert "training on the same GPUs" in texts(figure)


def test_idle_time_is_hatched_and_every_kind_has_a_colour_of_its_own(small_run: Run) -> None:
    figure = timeline_figure(
        small_run("verl_colocated"), steady_window(small_run("verl_colocated"))
    )
    looks = {p.get_label(): p for p in figure.axes[0].findobj(PathPatch)}
    assert looks["idle"].get_hatch() == LOOKS["idle"].hatch
    assert all(patch.get_hatch() is None for kind, patch in looks.items() if kind != "idle")
    assert len({LOOKS[kind] for kind in KINDS}) == len(KINDS)
    used = set().union(
        *(
            small_run(s).spans.column("kind").unique().to_pylist()
            for s in ("verl_colocated", "areal")
        )
    )
    assert used <= set(KINDS)
    assert len(used) > 6


def test_a_kind_without_a_colour_is_drawn_under_its_name(small_run: Run) -> None:
    result = small_run("areal")
    kinds = ["draft" if k == "load_weights" else k for k in result.spans.column("kind").to_pylist()]
    place = result.spans.schema.get_field_index("kind")
    changed = Result(
        result.spans.set_column(place, "kind", pa.array(kinds).dictionary_encode()),
        result.steps,
        result.samples,
        result.segments,
        result.metadata,
    )
    figure = timeline_figure(changed, steady_window(changed))
    assert "draft" in rectangles(figure.axes[0])
    assert "draft\nrollout GPUs" in texts(figure)


def test_the_same_result_gives_the_same_bytes(small_run: Run, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        save(timeline_figure(run := small_run("areal"), steady_window(run)), tmp_path / name)
        save(comparison_figure([summary(small_run("areal"), 2)]), tmp_path / f"comparison_{name}")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "comparison_a.png").read_bytes() == (
        tmp_path / "comparison_b.png"
    ).read_bytes()


def test_a_run_read_from_its_folder_looks_the_same(small_run: Run, tmp_path: Path) -> None:
    small_run("areal").write(tmp_path)
    save(timeline_figure(run := small_run("areal"), steady_window(run)), tmp_path / "a.png")
    save(timeline_figure(run := read_result(tmp_path), steady_window(run)), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_picture_is_a_png_in_which_every_kind_is_seen(small_run: Run, tmp_path: Path) -> None:
    save(
        timeline_figure(run := small_run("verl_colocated"), steady_window(run)),
        tmp_path / "timeline.png",
    )
    pixels = imread(tmp_path / "timeline.png")[:, :, :3].reshape(-1, 3)
    for kind in ("rollout", "switch", "log_prob", "train"):
        color = np.array([int(LOOKS[kind].color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - color).max(axis=1) < 0.01).sum() > 500, kind


def test_a_comparison_has_a_bar_a_row_as_long_as_its_speed(small_run: Run) -> None:
    rows = [summary(small_run(system), 2) for system in ("verl_colocated", "areal")]
    rows += [{**row, "variant": "cluster.gpus=16"} for row in rows]
    figure = comparison_figure(rows)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [
        row["samples_per_s"] for row in rows
    ]
    colors = [bar.get_facecolor() for bar in figure.axes[0].patches]
    assert colors[:2] == colors[2:]
    assert colors[0] != colors[1]
    words = texts(figure)
    for row in rows:
        assert row["variant"] in words
        assert f"{row['rollout_bubble']:.1%}" in words
        assert f"{row['off_policyness_mean']:.2f} ({row['off_policyness_max']})" in words


def test_the_fastest_system_of_a_variant_is_bold(small_run: Run) -> None:
    rows = [summary(small_run(system), 2) for system in ("verl_colocated", "split", "areal")]
    best = max(rows, key=lambda row: row["samples_per_s"])["system"]
    names = {row["system"] for row in rows}
    weights = {t.get_text(): t.get_fontweight() for t in comparison_figure(rows).axes[0].texts}
    assert {name for name in names if weights[name] == "bold"} == {best}


def test_a_comparison_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one row"):
        comparison_figure([])


def test_a_picture_of_another_format_is_refused_and_nothing_is_written(
    small_run: Run, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"a\.docx: a picture cannot be written as"):
        save(timeline_figure(run := small_run("areal"), steady_window(run)), tmp_path / "a.docx")
    assert list(tmp_path.iterdir()) == []


def inside(figure: Figure) -> bool:
    """Return whether every text, legend and axis is within the figure."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)  # which lays it out
    box, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
    return (
        box.x0 >= -HAIR and box.y0 >= -HAIR and box.x1 <= width + HAIR and box.y1 <= height + HAIR
    )


@pytest.fixture(scope="module")
def every_kind() -> Result:
    """A run of 64 GPUs with spans of every kind at its workers and at its trainer."""
    workload = {
        "steps": 4,
        "prompts_per_step": 32,
        "group": 4,
        "cap_tokens": 2000,
        "mean_tokens": 400,
        "sigma": 0.9,
    }
    scenario = Scenario.model_validate(
        {
            "name": "many",
            "steps": 4,
            "warmup_steps": 1,
            "model": "qwen3-0.6b",
            "cluster": {"gpu": "h100", "gpus": 80, "tp": 1},
            "workload": {"synthetic": {**workload, "prompt_share": 0.5}},
            "profile": {"roofline": {}},
            "system": {"name": "one_step_off", "rollout_share": 0.8},
        }
    )
    run = simulate(scenario)
    kinds = pa.array([KINDS[i % len(KINDS)] for i in range(run.spans.num_rows)]).dictionary_encode()
    place = run.spans.schema.get_field_index("kind")
    return Result(
        run.spans.set_column(place, "kind", kinds),
        run.steps,
        run.samples,
        run.segments,
        run.metadata,
    )


def test_the_legend_of_64_workers_and_every_kind_is_inside_the_picture_and_off_the_panels(
    every_kind: Result,
) -> None:
    assert every_kind.metadata["rollout_workers"] == 64
    figure = timeline_figure(every_kind, steady_window(every_kind, 2))
    assert inside(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    assert {text.get_text().split("\n")[0] for text in legend.get_texts()} == {
        kind_words(kind) for kind in KINDS
    }
    assert all(text.get_fontsize() > 8 for text in legend.get_texts())
    texts = [text for text in figure.texts if text.get_text()]
    for drawn in (legend, *texts):
        box = drawn.get_window_extent(renderer)
        assert not any(box.overlaps(axes.get_window_extent(renderer)) for axes in figure.axes)
        assert not any(
            box.overlaps(other.get_window_extent(renderer)) for other in texts if other is not drawn
        )


def test_every_picture_of_runs_has_its_texts_inside(small_run: Run, every_kind: Result) -> None:
    named = small_run(
        "areal", eta=4, rollout_share=0.75, on_stale="drop", minibatches=2, interruptible=False
    )
    runs = [small_run("verl_colocated"), small_run("one_step_off"), named, every_kind]
    rows = [{**summary(run, 1), "variant": f"cluster.gpus={i // 2}"} for i, run in enumerate(runs)]
    each = (rows, runs, [1] * len(runs))
    falls = [waterfall(run, *window(run, 1)) for run in runs]
    falls += [replace(falls[0], gpu_s=dict.fromkeys(PARTS, falls[0].total_gpu_s / len(PARTS)))]
    figures = {
        "speed": comparison_figure(rows),
        "GPU-seconds": gpu_seconds_figure([*rows, rows[0]], falls),
        "bubbles": bubble_figure(*each),
        "staleness": staleness_figure(*each),
        "explanation": explanation_figure(explain_result(runs[0])),
        "difference": difference_figure(diff_results(runs[0], runs[1])),
        **run_figures(runs[1], 1),
    }
    assert [name for name, figure in figures.items() if not inside(figure)] == []


def test_the_legend_of_many_lines_of_a_sweep_covers_none_of_them() -> None:
    rows = [
        {"system.name": f"system_{i}", "cluster.gpus": gpus, "samples_per_s": i * gpus}
        for i in range(30)
        for gpus in (16, 32)
    ]
    figure = sweep_figure(rows, ["system.name", "cluster.gpus"], "samples_per_s", x="cluster.gpus")
    assert inside(figure)
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 30
    assert not legend.get_window_extent(renderer).overlaps(
        figure.axes[0].get_window_extent(renderer)
    )


def test_a_band_spans_the_seeds_and_the_bars_add_the_error_of_a_step() -> None:
    keys = ["system.name", "cluster.gpus", "seed"]
    rows = [
        dict(zip(keys, at, strict=True)) | {"samples_per_s": 10.0 * at[2], "train_idle": 0.1}
        for at in product(("areal", "split"), (16, 32), (1, 2, 3))
    ]
    figure = sweep_figure(rows, keys, "samples_per_s", x="cluster.gpus", band="seed")
    axes = figure.axes[0]
    bands, bars = axes.collections[0], axes.collections[1]
    assert list(axes.lines[0].get_ydata()) == [20, 20] and inside(figure)
    assert set(bands.get_paths()[0].vertices[:, 1]) == {10, 30}
    assert np.allclose(bars.get_segments()[0][:, 1], [10 * 0.85, 30 * 1.15])
    assert "15%" in axes.get_title(loc="left")
    with pytest.raises(InputError, match="leave y out"):
        sweep_figure(rows, keys, "samples_per_s", x="cluster.gpus", y="system.name", band="seed")
    with pytest.raises(InputError, match="band='model'"):
        sweep_figure(rows, keys, "samples_per_s", x="cluster.gpus", band="model")


def test_a_map_has_a_bar_that_names_its_colours_and_axes_in_words() -> None:
    keys = ["system.name", "system.rollout_share", "cluster.gpus", "engine.block_size"]
    rows = [
        dict(zip(keys, at, strict=True)) | {"samples_per_s": at[2] * at[1]}
        for at in product(("areal", "split"), (0.5, 0.625, 0.75), (16, 32, 64), (16,))
    ]
    figure = sweep_figure(rows, keys, "samples_per_s")
    bar = figure.axes[-1]
    assert bar.get_ylabel() == "trained samples a second" and bar.get_ylim() == (8, 48)
    assert {figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()} == {
        "share of GPUs that roll out",
        "GPUs",
    }
    assert inside(figure)
    assert (
        sweep_figure(rows, keys[:2], "samples_per_s").axes[0].get_xlabel()
        == "share of GPUs that roll out"
    )


def test_a_colour_is_written_in_the_palette_alone_and_means_one_thing() -> None:
    alike = [look for look in LOOKS.values() if list(LOOKS.values()).count(look) > 1]
    assert set(alike) == {
        LOOKS["rollout"],
        LOOKS["idle"],
    }  # rollout decodes; workers idle beside busy ones
    assert {look.color for look in LOOKS.values()}.isdisjoint(SERIES)
    idle = {key for key in LOOKS if "idle" in key or "wait" in key}
    assert {key for key, look in LOOKS.items() if look.color == LOOKS["idle"].color} == idle
    assert all(LOOKS[key].hatch for key in idle)
    assert set(PARTS) <= set(LOOKS)
    names = re.compile(r"""["']#[0-9A-Fa-f]{3,8}["']|color["']?\s*[=:]\s*f?["'](?!none)""")
    root = Path(__file__).parents[2]
    drawers = [
        path for part in ("simrl", "experiments", "docs") for path in (root / part).rglob("*.py")
    ]
    written = {
        path.name: names.findall(text)
        for path in drawers
        if "matplotlib" in (text := path.read_text(encoding="utf-8"))
    }
    assert {name for name, found in written.items() if found} == {"style.py"}
    page = (root / "simrl/show/report/page.js").read_text(encoding="utf-8")
    assert not any(
        color in page for color in {*SERIES, *(look.color for look in LOOKS.values())} - {INK}
    )
