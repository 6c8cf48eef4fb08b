"""simulate(): what cannot be is refused before anything runs, and the same scenario gives the same bytes."""

import gc
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import gpu
from simrl.profile.model_shape import model_shape
from simrl.profile.profile import ProfileMetadata, TableProfile, write_profile
from simrl.profile.profilers.roofline import roofline_profile
from simrl.result.result import METADATA_FILE, TABLES
from simrl.runtime import recorder
from simrl.runtime.simulated_worker import SimulatedWorker
from simrl.scenario.load import load_scenarios, override
from simrl.scenario.model import Scenario
from simrl.show.inputs import inputs
from simrl.simulate.cache import InputCache
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate
from simrl.simulate.training_checks import TrainingMemoryError, TrainingNeed
from simrl.study.compare import require_possible
from simrl.systems.recipes import RECIPES, make_system
from simrl.trace.trace import write_trace
from tests.helpers import lanes, on_gpus, one_second_a_pass, prepared, rows, scenario, trace

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
H100 = {"gpu": "h100", "gpus": 4, "tp": 1}


def refusal(scenario: Scenario) -> str:
    with pytest.raises(InputError) as refused:
        prepare(scenario)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# What is refused: (what is wrong, its place and value in the message, what would be right).
@pytest.mark.parametrize(
    ("changes", "place", "remedy"),
    [
        (
            {"cluster": {**H100, "tp": 3}},
            "cluster.tp is 3: it does not divide the 4 GPUs",
            "choose a divisor",
        ),
        (
            {"cluster": {**H100, "gpus": 64, "tp": 32}},
            "cluster.tp is 32: it does not divide the 16 attention heads of qwen3-0.6b",
            "choose a divisor",
        ),
        (
            {"training": {"sequence_parallel": 3}},
            "training.sequence_parallel is 3: it does not divide the 4 train GPUs",
            "choose a divisor",
        ),
        (
            {"model": "qwen3-32b", "engine": {"gpu_memory_utilization": 0.8}},
            "qwen3-32b at tp 1 needs 65 GiB a GPU (weights 61.0 GiB, reserve_bytes (activations, CUDA graphs of plain "
            "decoding, buffers) 3.7 GiB); an H100 has 80 GiB (64 after a reserve for CUDA and NCCL): nothing is left",
            "use a larger tp or another GPU",
        ),
        (
            {"engine": {"kv_cache_tokens": 100}},
            "its longest sample has 220 tokens, the KV cache of a worker (qwen3-0.6b, tp 1, h100) holds 100",
            "a lower cap",
        ),
        (
            {"model": "qwen3-14b"},
            "training: qwen3-14b on 4 h100 needs",
            "it fits with",
        ),
        (
            {"system": {"name": "split", "rollout_share": 0.1}},
            "system split: rollout_share 0.1 of 4 GPUs, 1 a worker, leaves 0 rollout and 4 train GPUs",
            "use more GPUs, or another share",
        ),
        ({"system": {"name": "verl"}}, "system 'verl' is unknown", "simrl systems lists all"),
        (
            {"system": {"name": "areal", "staleness": 8}},
            "system areal: unknown parameter 'staleness'",
            "it has eta, rollout_share",
        ),
        ({"system": {"name": "areal", "eta": -1}}, "system areal: eta is -1", "give 0 or more"),
        (
            {"system": {"name": "split", "dispatch": "lpt"}},
            "system split: dispatch is 'lpt'",
            "choose even_split",
        ),
        ({"model": "qwen3-9b"}, "model qwen3-9b", "qwen3-8b"),
        (
            {"cluster": {**H100, "gpu": "h900"}},
            "gpu 'h900' is unknown",
            "simrl profile names lists its 29",
        ),
        (
            {"workload": {"trace": "nowhere.parquet"}},
            "nowhere.parquet: no such file",
            "simrl trace import",
        ),
        (
            {"profile": {"path": "nowhere.parquet"}},
            "nowhere.parquet: no such profile",
            "simrl has it: profile.path=",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_in_a_line_with_its_place_value_and_remedy(
    changes, place, remedy
):
    line = refusal(scenario(**changes))
    assert place in line
    assert remedy in line[line.index(place) + len(place) :]


def test_the_longest_sample_fits_a_cache_of_just_its_blocks(tmp_path):
    write_trace(trace([[[(20, 200)]]]), tmp_path / "t.parquet")
    of = {"workload": {"trace": str(tmp_path / "t.parquet")}}
    assert prepare(scenario(**of, engine={"kv_cache_tokens": 224})).limits.kv_blocks == 14
    assert "220 tokens" in refusal(
        scenario(**of, engine={"kv_cache_tokens": 223})
    )  # 13 whole blocks hold 208


def test_a_profile_of_another_model_gpu_or_tp_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    for found in (("qwen3-8b", "h100", 1), ("qwen3-0.6b", "h200", 1), ("qwen3-0.6b", "h100", 2)):
        model, kind, tp = found
        write_profile(roofline_profile(model_shape(model), gpu(kind), tp), path)
        line = refusal(scenario(profile={"path": str(path)}))
        assert (
            f"{path}: a profile of {model} on {kind} tp{tp}, the scenario has qwen3-0.6b on h100 tp1"
            in line
        )
        assert "name the profile that belongs to it" in line


def test_a_profile_that_does_not_reach_the_engines_limits_is_extended_and_says_so(tmp_path):
    path = tmp_path / "p.parquet"
    metadata = ProfileMetadata(
        model="qwen3-0.6b", gpu="h100", tp=1, kind="assumed", source="a test"
    )
    narrow = one_second_a_pass()._replace(dense_tokens=np.array([1.0]), dense_s=np.array([1.0]))
    write_profile(TableProfile(narrow, metadata), path)
    profile = prepare(scenario(profile={"path": str(path)})).profile
    assert profile.tables.dense_tokens[-1] == 8192
    assert "extrapolated by the roofline beyond 1 tokens of a pass" in profile.corrections[-1]


# What is prepared.


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_system_that_can_be_prepared_and_says_where_it_is_from(name):
    ready = prepare(scenario(name))
    assert ready.system.paper
    gpus = ready.workers * ready.gpus_per_worker + (0 if ready.colocated else ready.train_gpus)
    assert ready.gpus == ready.scenario.cluster.gpus * (1 + ready.system.extra_rollout_gpus)
    assert (
        ready.gpus - ready.gpus_per_worker < gpus <= ready.gpus
    )  # what makes no further worker only trains
    assert make_system(name, {}).label == name


def test_truth_values_in_a_name_are_words_that_can_be_typed():
    label = make_system("tlt", {"adaptive": False, "packing": True, "threshold": 8}).label
    assert label == "tlt(adaptive=off, packing=on, threshold=8)"
    typed = {
        text.partition("=")[0]: override(f"system.{text}").value
        for text in ("adaptive=off", "packing=on")
    }
    assert scenario({"name": "tlt", **typed}).system.parameters == {
        "adaptive": False,
        "packing": True,
    }


def test_gpus_that_make_no_whole_worker_train():
    ready = prepare(
        scenario(
            {"name": "split", "rollout_share": 0.75}, cluster={"gpu": "h100", "gpus": 10, "tp": 2}
        )
    )
    assert (ready.workers, ready.train_gpus) == (3, 4)


def test_weights_are_loaded_over_the_network_or_within_a_node_a_share_a_gpu():
    training = {"load_overhead_s": 2.0}
    weights = model_shape("qwen3-0.6b").weight_bytes
    cluster = {"gpu": "h100", "gpus": 4, "tp": 2}
    colocated = prepare(scenario("verl_colocated", training=training, cluster=cluster))
    split = prepare(
        scenario({"name": "split", "rollout_share": 0.5}, training=training, cluster=cluster)
    )
    assert colocated.costs.load_s == pytest.approx(2.0 + weights / 2 / 450e9)
    assert split.costs.load_s == pytest.approx(2.0 + weights / 2 / 450e9)
    apart = prepare(scenario("split", training=training, cluster={**cluster, "gpus": 16}))
    assert apart.costs.load_s == pytest.approx(2.0 + weights / 2 / 50e9)
    known = prepare(
        scenario("verl_colocated", training={**training, "load_s": 0.25}, cluster=cluster)
    )
    assert known.costs.load_s == 0.25


def test_the_kv_cache_is_what_the_weights_and_the_reserve_leave_of_the_memory():
    shape = model_shape("qwen3-0.6b")
    ready = prepare(scenario(engine={"gpu_memory_utilization": 0.5, "reserve_bytes": 1e9}))
    tokens = (0.5 * 81559 * 2**20 - 1e9 - shape.weight_bytes) / shape.kv_bytes_per_token
    assert ready.limits.kv_blocks == int(tokens) // 16


# What comes out.


@pytest.mark.parametrize(
    ("name", "given", "on", "kind"),
    [
        ("verl_colocated", None, True, "default"),
        ("areal", None, False, "default"),
        ("areal", True, True, "given"),
        ("one_step_off", False, False, "given"),
    ],
)
def test_engines_cache_prefixes_as_the_scenario_says_or_else_as_the_system_has_it(
    name, given, on, kind
):
    ready = prepare(scenario(name, engine={"prefix_caching": given}))
    assert ready.limits.prefix_caching == on
    shown = {each.name: (each.value, each.kind) for each in inputs(ready.inputs())}
    assert shown["prefix caching"] == ("on" if on else "off", kind)


def test_every_update_is_told_while_it_runs():
    told = []
    simulate(scenario(), on_step=told.append)
    assert told == [0, 1, 2]


def test_the_result_says_what_it_rests_on():
    result = simulate(scenario({"name": "areal", "eta": 2}, variant="x=1"))
    metadata = result.metadata
    assert (metadata["system"], metadata["label"], metadata["variant"]) == (
        "areal",
        "areal(eta=2)",
        "x=1",
    )
    assert metadata["profile"]["kind"] == "assumed"
    assert "H100" in metadata["profile"]["source"]
    assert metadata["trace"]["kind"] == "synthetic"
    assert metadata["scenario"]["training"]["mfu"] is None
    assert metadata["paper"] == "AReaL, arXiv 2505.24298"
    assert (metadata["rollout_workers"], metadata["train_gpus"], metadata["gpus"]) == (3, 1, 4)


def test_a_run_ends_with_the_passes_under_way_at_its_last_update_and_nothing_is_submitted_after():
    """I6: nothing begins after the last update."""
    result = simulate(on_gpus("areal", {"eta": 1}, workers=2))
    end_s, updated_s = result.metadata["end_s"], rows(result.steps)[-1]["finished_s"]
    segments = rows(result.segments)
    assert updated_s < end_s == max(row["ended_s"] for row in segments)
    assert all(row["started_s"] < updated_s for row in segments)
    assert all(
        row["started_s"] is None or row["started_s"] < updated_s for row in rows(result.samples)
    )
    for spans in lanes(result).values():
        assert spans[-1]["ended_s"] == end_s
        late = [span for span in spans if span["ended_s"] > updated_s]
        assert all(span["started_s"] < updated_s or span["kind"] == "idle" for span in late)


def test_a_run_is_the_same_whether_its_scenario_was_prepared_alone_or_before():
    again = prepared(scenario("split"))
    assert simulate(scenario("split")).samples.equals(simulate(again.scenario).samples)


def files(folder):
    return {
        name: (folder / name).read_bytes()
        for name in (*(f"{table}.parquet" for table in TABLES), METADATA_FILE)
    }


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_scenario_gives_the_same_bytes(tmp_path, name):
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        simulate(scenario(name, seed=3)).write(tmp_path / folder)
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_is_the_same_whether_its_trained_samples_are_put_away_or_not(
    tmp_path, name, monkeypatch
):
    for folder, most in (("kept", 10**9), ("put_away", 5)):
        monkeypatch.setattr(recorder, "MOST_TRAINED", most)
        (tmp_path / folder).mkdir()
        simulate(scenario(name, steps=5)).write(tmp_path / folder)
    assert files(tmp_path / "kept") == files(tmp_path / "put_away")


def test_another_process_gives_the_same_bytes_for_every_system_and_another_seed_others(tmp_path):
    """I20: bytes are a function of scenario and seed."""
    chosen = [scenario(name, seed=3) for name in RECIPES]
    program = (
        "import sys, pathlib\n"
        "from simrl.scenario.model import Scenario\n"
        "from simrl.simulate.run import simulate\n"
        "for line in sys.stdin:\n"
        "    scenario = Scenario.model_validate_json(line)\n"
        "    folder = pathlib.Path(sys.argv[1]) / scenario.system.name\n"
        "    folder.mkdir(parents=True)\n"
        "    simulate(scenario).write(folder)\n"
    )
    lines = "\n".join(one.model_dump_json() for one in reversed(chosen))  # in another order, too
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "there")], input=lines, text=True, check=True
    )
    for one in chosen:
        here, other = tmp_path / "here" / one.system.name, tmp_path / "other" / one.system.name
        for folder, seed in ((here, 3), (other, 4)):
            folder.mkdir(parents=True)
            simulate(one.model_copy(update={"seed": seed})).write(folder)
        assert files(here) == files(tmp_path / "there" / one.system.name), one.system.name
        assert all(files(here)[name] != files(other)[name] for name in files(here)), one.system.name


def test_two_systems_see_the_same_lengths():
    """I22: lengths are the trace's."""
    lengths = [
        {
            (r["trace_step"], r["prompt_id"], r["sample"]): r["generated_tokens"]
            for r in rows(simulate(s).samples)
            if r["finished_s"]
        }
        for s in (scenario("verl_colocated"), scenario({"name": "areal", "eta": 1}))
    ]
    both = lengths[0].keys() & lengths[1].keys()
    assert len(both) > 20
    assert {key: lengths[0][key] for key in both} == {key: lengths[1][key] for key in both}


def test_nothing_of_a_run_stays_in_memory_when_it_is_over():
    """Its actors know each other: they go when garbage is looked for the next time, among what is young."""
    config = load_scenarios(QUICKSTART)[
        0
    ]  # a run that makes enough for garbage to be looked for at once

    def workers() -> list[SimulatedWorker]:
        return [thing for thing in gc.get_objects() if type(thing) is SimulatedWorker]

    before = workers()  # of other tests
    known = set(map(id, before))
    result = simulate(config)
    gc.collect(0)
    assert result.steps.num_rows
    assert [worker for worker in workers() if id(worker) not in known] == []


def test_what_is_said_to_fit_the_training_fits():
    changes = {"model": "qwen3-14b", "training": {"sharding": "optimizer"}}
    with pytest.raises(InputError) as refusal:
        prepare(scenario(**changes))
    offered = [
        text
        for text in str(refusal.value).partition("it fits with ")[2].split(" or with ")
        if "=" in text
    ]
    assert {text.partition("=")[0] for text in offered} >= {"training.tensor_parallel"}
    for text in offered:
        key, _, value = text.removeprefix("training.").partition("=")
        prepare(scenario(model="qwen3-14b", training={"sharding": "optimizer", key: value}))


TOO_LARGE = {"model": "qwen3-32b", "cluster": {"gpu": "h100", "gpus": 16, "tp": 2}}
SHARED = {"sharding": "optimizer", "sequence_parallel": 2, "recompute": True}


def test_where_no_single_setting_makes_training_fit_several_together_are_offered_and_fit():
    """246 GiB a GPU: no GPU has that memory, and 8 tensor-parallel ones need none."""
    alone = TOO_LARGE | {"cluster": {"gpu": "h100", "gpus": 8, "tp": 2}}
    with pytest.raises(InputError) as refusal:
        prepare(scenario("verl_colocated", **alone, training=SHARED))
    assert "more memory" not in str(refusal.value)
    offered = str(refusal.value).partition("it fits with ")[2].split(" or with ")
    assert all(" and " in text for text in offered if "GPUs" not in text)
    for text in offered:
        changes = dict(part.removeprefix("training.").split("=") for part in text.split(" and "))
        prepare(scenario("verl_colocated", **alone, training=SHARED | changes))


def test_a_comparison_is_offered_what_fits_all_of_its_systems():
    """Of 16 GPUs, one system trains on all and the other on 8: what the first fits with need not do for the second."""
    systems = ["verl_colocated", {"name": "one_step_off", "rollout_share": 0.5}]
    runs = [scenario(system, **TOO_LARGE, training=SHARED) for system in systems]
    with pytest.raises(InputError) as refusal:
        require_possible(runs, InputCache())
    offered = str(refusal.value).partition("all 2 runs fit with ")[2].split(" or with ")
    assert all(" and " in text for text in offered if "GPUs" not in text)
    settings = [text for text in offered if "GPUs" not in text]
    for text, system in itertools.product(settings, systems):
        changes = dict(part.removeprefix("training.").split("=") for part in text.split(" and "))
        prepare(scenario(system, **TOO_LARGE, training=SHARED | changes))


def test_memory_that_is_just_too_little_is_told_in_figures_that_differ(monkeypatch):
    need = prepare(scenario()).training_need(4)
    usable = 0.9 * need.costs.gpu.memory_bytes / 2**30  # GiB
    for more, words in (
        (0.03, ("needs 71.71 GiB", "71.68 after")),
        (100, ("needs 172 GiB", "72 after")),
    ):
        monkeypatch.setattr(TrainingNeed, "bytes_per_gpu", (usable + more) * 2**30)
        line = str(TrainingMemoryError(need))
        assert all(each in line for each in words)


def test_experts_that_do_not_divide_the_train_gpus_name_them_and_what_divides_both():
    experts = {"model": "qwen3-30b-a3b", "cluster": {"gpu": "h100", "gpus": 72, "tp": 2, "ep": 2}}
    path = Path(__file__).parents[2] / "profiles" / "qwen3-30b-a3b_h100_tp2_ep2.parquet"
    split = {"name": "one_step_off", "rollout_share": 0.5}
    with pytest.raises(
        InputError,
        match=r"does not divide the 36 GPUs that train; choose a divisor, such as 1, 2, 4$",
    ):
        prepare(
            scenario(split, **experts, profile={"path": str(path)}, training={"expert_parallel": 8})
        )
