"""Data sheets of GPUs: the named ones, and those that users give."""

from pathlib import Path

import pytest

from simrl.commands.profile import derive
from simrl.errors import InputError
from simrl.profile.hardware import GPUS, gpu, known_gpu
from simrl.profile.model_shape import MODELS
from simrl.profile.precision import precisions_of
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.roofline import Roofline
from simrl.scenario.load import load_scenarios
from simrl.show.inputs import provenance
from simrl.simulate.prepare import prepare
from simrl.simulate.run import simulate

SMALL = MODELS["qwen3-0.6b"]
NAMED = [name for name in GPUS if name != "cpu"]
YAML = """
name: own
model: qwen3-0.6b
steps: 2
cluster: {gpu: GPU, gpus: 4, tp: 1}
workload:
  synthetic: {steps: 2, prompts_per_step: 8, group: 2, cap_tokens: 256, mean_tokens: 100, sigma: 0.5, prompt_tokens: 64}
systems: [verl_colocated]
"""


def of(folder: Path, written: str, *overrides: str):
    path = folder / "scenario.yaml"
    path.write_text(YAML.replace("GPU", written, 1), encoding="utf-8")
    (scenario,) = load_scenarios(path, overrides)
    return scenario


@pytest.mark.parametrize("name", NAMED)
def test_every_gpu_rolls_out_by_its_roofline_and_trains(tmp_path: Path, name: str):
    assert known_gpu(name) == name
    scenario = of(tmp_path, name, "profile.roofline={}")
    assert simulate(scenario).metadata["profile"]["gpu"] == name


def test_decoding_follows_the_bandwidth_of_the_memory():
    steps = {
        name: roofline_profile(MODELS["qwen3-8b"], GPUS[name]).decode_s(8, 4096) for name in NAMED
    }
    by_bandwidth = sorted(NAMED, key=lambda name: GPUS[name].memory_bytes_per_s)
    assert [steps[name] for name in by_bandwidth] == sorted(steps.values(), reverse=True)


def test_the_chips_with_a_rate_of_fp4_multiply_in_it():
    shape = MODELS["qwen3-8b"]
    fast = {name for name in NAMED if "nvfp4" in precisions_of(GPUS[name], shape)}
    assert fast == {"b200", "gb200", "b300", "gb300", "rtxpro6000", "rtx5090"}
    b200 = Roofline(shape, GPUS["b200"], precision="nvfp4")
    assert b200.flops_per_s("nvfp4") == pytest.approx(0.95 * 9e15 * 0.3)


@pytest.mark.parametrize(
    "name",
    [
        "v100",
        "t4",
        "a30",
        "a10",
        "rtx 3090",
        "H20-3e",
        "b100",
        "L40",
        "mi300a",
        "gaudi2",
        "tpu",
        "trainium",
        "a100x",
    ],
)
def test_a_device_without_a_sheet_is_never_taken_for_another(name: str):
    with pytest.raises(InputError) as error:
        gpu(name)
    assert "did you mean" not in str(error.value)
    assert "simrl has no data sheet of it" in str(error.value)
    assert "cluster.gpu={name: " in str(error.value)


@pytest.mark.parametrize("name", ["Ascend 910B", "910B", "ascend910b"])
def test_a_name_of_several_devices_is_refused_with_its_variants(name: str):
    with pytest.raises(InputError, match="did you mean ascend910b2 or ascend910b3 or ascend910b4"):
        gpu(name)


@pytest.mark.parametrize(
    ("slip", "meant"), [("h10O", "h100"), ("H-100", "h100"), ("mi30x0", "mi300x")]
)
def test_letters_and_digits_in_another_order_are_a_slip(slip: str, meant: str):
    with pytest.raises(InputError, match=rf"did you mean {meant}\?"):
        gpu(slip)


def test_a_sheet_on_a_base_has_the_rest_of_the_base_and_its_kernels(tmp_path: Path):
    scenario = of(tmp_path, "{base: h100, memory_bytes_per_s: 3.9e12}")
    cluster = scenario.cluster
    assert cluster.gpu == cluster.sheet.name == "h100-own"
    assert cluster.rollout_kind.memory_bytes_per_s == 3.9e12
    assert cluster.train_kind.bf16_flops == GPUS["h100"].bf16_flops
    assert "memory_bytes_per_s; the rest as h100" in cluster.sheet.source
    faster, base = (
        prepare(one).profile.decode_s(8, 4096) for one in (scenario, of(tmp_path, "h100"))
    )
    assert faster < base
    assert "extrapolated" in prepare(scenario).profile.metadata.kind


def test_a_sheet_without_a_base_names_what_is_assumed(tmp_path: Path):
    sheet = "{name: v100, memory_bytes: 32e9, memory_bytes_per_s: 900e9, bf16_flops: 125e12}"
    result = simulate(of(tmp_path, sheet))
    (links,) = [line for line in provenance([result.metadata]) if line.startswith("Links: ")]
    assert "v100: the user's data sheet: memory_bytes, memory_bytes_per_s, bf16_flops" in links
    assert "assumed: matmul_share 0.75, link_bytes_per_s 3.2e+10" in links
    assert result.metadata["profile"]["kind"] == "extrapolated"


def test_a_result_can_be_repeated_without_the_file_of_its_sheet(tmp_path: Path):
    file = tmp_path / "Mine 2.toml"
    file.write_text("base = 'h200'\nhost_speed = 0.5\n", encoding="utf-8")
    first = of(tmp_path, "Mine 2.toml")
    assert first.cluster.gpu == "mine-2" and first.cluster.sheet.host_speed == 0.5
    again = type(first).model_validate(first.model_dump(mode="json"))
    file.unlink()
    assert again.model_dump_json() == first.model_dump_json()
    other = of(tmp_path, "a100")
    replaced = {**first.model_dump(), "cluster": {**first.model_dump()["cluster"], "gpu": "a100"}}
    assert type(first).model_validate(replaced).cluster == other.cluster


def test_two_sheets_of_one_name_are_two_scenarios_and_two_profiles(tmp_path: Path):
    slow, fast = (
        of(tmp_path, f"{{base: h100, name: mine, memory_bytes_per_s: {rate}}}")
        for rate in (2e12, 4e12)
    )
    assert slow.model_dump_json() != fast.model_dump_json()
    from simrl.simulate.cache import InputCache

    inputs = InputCache()
    times = [prepare(one, inputs).profile.decode_s(1, 4096) for one in (slow, fast)]
    assert times[0] > times[1]


def test_the_sheet_of_the_training_pool_counts_also_where_both_have_one_name(tmp_path: Path):
    roomy = "cluster.gpu={base: h100, memory_bytes: 4e10}"
    train = "cluster.train={gpu: {base: h100, fp8_flops: 1e15, bf16_flops: 5e14}, gpus: 4}"
    cluster = of(tmp_path, "h100", roomy, train, "cluster.gpus_per_node=4").cluster
    assert cluster.gpu == cluster.train.gpu == "h100-own"
    assert (cluster.rollout_kind.memory_bytes, cluster.rollout_kind.bf16_flops) == (4e10, 989e12)
    assert cluster.train_kind.memory_bytes == GPUS["h100"].memory_bytes
    assert (cluster.train_kind.bf16_flops, cluster.train_kind.gpus_per_node) == (5e14, 8)
    equal = "cluster.train={gpu: {base: h100, memory_bytes: 4e10}, gpus: 4}"
    cluster = of(tmp_path, "h100", roomy, equal, "cluster.gpus_per_node=4").cluster
    assert cluster.train_kind == cluster.rollout_kind


def test_a_profile_is_derived_for_a_sheet_on_the_command_line(tmp_path: Path):
    view = derive(
        "qwen3-0.6b",
        "{base: h100, name: mine, memory_bytes_per_s: 3.9e12}",
        output=tmp_path / "mine.parquet",
        source="roofline",
    )
    assert view.data["gpu"] == "mine" and (tmp_path / "mine.parquet").exists()


def test_grace_hosts_launch_slower_unless_the_scenario_says_otherwise(tmp_path: Path):
    kinds = [
        of(tmp_path, "gh200", *more).cluster.train_kind
        for more in ((), ("cluster.host_speed=0.8",))
    ]
    assert [kind.host_speed for kind in kinds] == [0.41, 0.8]
    assert prepare(of(tmp_path, "gh200")).training_costs(4).gpu.host_speed == 0.41
    assert (
        "hosts of gh200 at a speed of 0.41, measured on another machine"
        in prepare(of(tmp_path, "gh200")).links
    )


@pytest.mark.parametrize(
    ("sheet", "message"),
    [
        (
            "{base: h100, memroy_bytes: 3}",
            r"unknown key cluster\.sheet\.memroy_bytes \(did you mean memory_bytes\?\)",
        ),
        ("{base: h100, memory_bytes: lots}", r"memory_bytes is 'lots': a number is needed"),
        (
            "{name: own, memory_bytes: 8e10, memory_bytes_per_s: 3e12, bf16_flops: 989e12, fp8_flops: 3958e12}",
            "is no half of fp8_flops, .*sparsity",
        ),
        ("{base: h100, bf16_flops: 1979e12}", "is twice .*, the dense rate of h100: .*sparsity"),
        ("{base: h100, fp8_flops: 3958e12}", "is twice .*, the dense rate of h100: .*sparsity"),
        (
            "{base: h100, bf16_flops: 1979e12, fp8_flops: 3958e12}",
            r"bf16_flops 1\.979e\+15 is twice 9\.89e\+14, the dense rate of h100: is it with sparsity",
        ),
        ("{base: a100, bf16_flops: 624e12}", "is twice 3.12e.14, the dense rate of a100"),
        ("{base: b200, fp4_flops: 18e15}", "fp4_flops .* is twice 9e.15, the dense rate of b200"),
        ("{name: mine, memory_bytes: 3e10}", r"key cluster\.sheet\.memory_bytes_per_s is missing"),
        ("{base: v100}", "gpu 'v100' is unknown"),
        ("{base: h100, memory_bytes: 80}", "memory_bytes is 80, .* Give bytes, 1e.08 or more"),
        ("{base: h100, memory_bytes_per_s: 3350}", "Give bytes a second, 1e.09 or more"),
        ("{base: a100, bf16_flops: 312}", "bf16_flops is 312, .* Give operations a second, 1e.10"),
        ("{base: h100, link_bytes_per_s: 450}", "link_bytes_per_s is 450, .*, 1e.06 or more"),
        ("h100, sheet: {memory_bytes: 4e10}", "cluster: sheet is not of gpu h100: give your data"),
        ("h100, sheet: {name: mine, memory_bytes: 4e10}", "sheet is not of gpu h100"),
        ("gone.toml", r"gone\.toml: No such file or directory"),
        ("wrong.toml", r"wrong\.toml: .*line 1"),
        ("text.toml", r"text\.toml: memory_bytes is 'lots': a number is needed"),
    ],
)
def test_a_wrong_sheet_is_refused_in_one_line(tmp_path: Path, sheet: str, message: str):
    (tmp_path / "wrong.toml").write_text("base = h100", encoding="utf-8")
    (tmp_path / "text.toml").write_text("base = 'h100'\nmemory_bytes = 'lots'", encoding="utf-8")
    with pytest.raises(InputError, match=message) as error:
        of(tmp_path, sheet)
    assert "\n" not in str(error.value)
