"""Profiles of mixtures of experts and of other precisions."""

from pathlib import Path

import numpy as np
import pytest

from simrl.errors import InputError
from simrl.profile.hardware import GPUS, gpu
from simrl.profile.model_shape import MODELS, model_shape
from simrl.profile.profile import ProfileMetadata, TableProfile, joined, read_profile, write_profile
from simrl.profile.profilers import aiconfigurator
from simrl.profile.profilers.roofline import roofline_profile
from simrl.profile.profilers.setups import EngineSetup
from simrl.profile.shipped import file_name, shipped_profile
from simrl.speculation.draft_times import eagle_drafts

FOLDER = Path(__file__).parents[2] / "profiles"
SHIPPED = [path for path in sorted(FOLDER.glob("*.parquet")) if read_profile(path).metadata.routing]
BYTES = {
    "bf16": 2.0,
    "fp8-block": 1.0,
    "w4a16_mxfp4": 0.5,
    "nvfp4": 0.5,
}  # of a weight, at the least


def with_experts(ranks: int) -> TableProfile:
    """A roofline of a dense model, and experts beside it."""
    profile = roofline_profile(model_shape("qwen3-8b"), gpu("h100"))
    tokens = np.array([1.0, 3.0, 100.0, 70000.0]) * ranks
    tables = profile.tables._replace(
        expert_tokens=tokens, experts_s=np.array([1e-3, 1.5e-3, 4e-3, 2.0])
    )
    of = {
        "dp": ranks,
        "ep": ranks,
        "routing": "balanced",
        "precision": "fp8-block",
        "kv_precision": "fp8",
    }
    return TableProfile(tables, profile.metadata.model_copy(update=of))


# ---------------------------------------------------------------- the table of experts


def test_the_experts_of_one_rank_are_part_of_the_dense_time():
    apart, profile = with_experts(2).tables, with_experts(1)
    plain = roofline_profile(model_shape("qwen3-8b"), gpu("h100"))
    assert profile.tables.expert_tokens.size == 0
    for tokens in (1, 2, 3, 77, 4096, 65536):
        experts_s = np.interp(2 * tokens, apart.expert_tokens, apart.experts_s)
        assert profile.decode_s(1, 100) - plain.decode_s(1, 100) == pytest.approx(1e-3)
        assert profile.pass_s(tokens, 1) - plain.pass_s(tokens, 1) == pytest.approx(experts_s)


def test_experts_of_several_ranks_stay_apart_and_times_mean_equal_ranks():
    profile, one = with_experts(4), with_experts(1)
    assert profile.tables.expert_tokens.tolist() == [4, 12, 400, 280000]
    for tokens in (1, 3, 50, 4096):
        assert profile.pass_s(tokens, 1) == pytest.approx(one.pass_s(tokens, 1))
    slower = profile.with_corrections(forward=2.0)
    assert slower.decode_s(8, 1000) - slower.tables.between_passes_s == pytest.approx(
        2 * (profile.decode_s(8, 1000) - profile.tables.between_passes_s)
    )


def test_tables_without_experts_are_joined_as_they_are():
    tables = roofline_profile(model_shape("qwen3-8b"), gpu("h100")).tables
    assert joined(tables) is tables


def test_experts_ranks_precision_and_routing_survive_the_file(tmp_path):
    profile = with_experts(4)
    write_profile(profile, tmp_path / "p.parquet")
    again = read_profile(tmp_path / "p.parquet")
    assert again.metadata == profile.metadata
    assert np.array_equal(again.tables.experts_s, profile.tables.experts_s)
    assert np.array_equal(again.tables.expert_tokens, profile.tables.expert_tokens)


def test_a_profile_of_a_dense_model_says_nothing_of_experts():
    written = read_profile(FOLDER / "qwen3-8b_h100_tp1.parquet").metadata.model_dump()
    assert not {"dp", "ep", "precision", "kv_precision", "routing"} & set(written)


@pytest.mark.parametrize(
    ("seconds", "wrong"),
    [
        ([1e-3, 0.5e-3], "falls along query_tokens at query_tokens 2"),
        ([-1e-3, 1e-3], "has -0.001 s at query_tokens 1"),
        ([1e-3, np.nan], "has a hole at query_tokens 2"),
        ([1e-3], "has the shape"),
    ],
)
def test_experts_that_fall_or_have_holes_are_refused(seconds: list[float], wrong: str):
    profile = roofline_profile(model_shape("qwen3-8b"), gpu("h100"))
    tables = profile.tables._replace(
        expert_tokens=np.array([1.0, 2.0]), experts_s=np.array(seconds)
    )
    with pytest.raises(InputError, match=f"table 'experts' {wrong}"):
        TableProfile(tables, profile.metadata)


def test_a_file_is_named_by_all_that_is_not_the_default():
    of = ProfileMetadata(
        model="m", gpu="h100", tp=2, dp=4, ep=8, precision="fp8-block", kind="", source=""
    )
    assert file_name(of) == "m_h100_tp2_dp4_ep8_fp8-block.parquet"
    assert (
        file_name(of.model_copy(update={"dp": 1, "ep": 1, "precision": "bf16"}))
        == "m_h100_tp2.parquet"
    )
    assert shipped_profile("qwen3-30b-a3b", "h100", 1, 8, 8) is not None
    assert shipped_profile("qwen3-30b-a3b", "h100", 1, 8, 1) is None


# ---------------------------------------------------------------- the shipped files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_mixture_of_experts_is_no_faster_than_its_data_sheet(path: Path):
    profile = read_profile(path)
    m, card = profile.metadata, GPUS[profile.metadata.gpu]
    shape, gpus = MODELS[m.model], m.tp * m.dp
    active_bytes = BYTES[m.precision] * shape.active_body_parameters / gpus
    assert profile.decode_s(1, 512) > active_bytes / card.memory_bytes_per_s
    computing = (
        m.dp * shape.forward_flops(8192, 0) / gpus / (card.bf16_flops * 2 / BYTES[m.precision])
    )
    assert computing < profile.prefill_s(8192) < 16 * computing


def test_experts_pay_for_more_tokens_by_the_experts_they_touch():
    """A few tokens read a few experts; 64 times the tokens cost less than all of the 128 experts once more."""
    profile = read_profile(FOLDER / "qwen3-30b-a3b_h100_tp1.parquet")
    one, many, more = (profile.decode_s(n, 1024) for n in (1, 64, 128))
    assert 4 * one < many and more < 1.5 * many


# ---------------------------------------------------------------- kernels that nobody measured


class Handle:
    """A database in which every operation takes 1 ms and the states of linear layers have the source's tag `tag`."""

    def __init__(self, names: list[str], tag: str) -> None:
        self.rows = [
            (name, 1.0, 0.0, tag if "mamba" in name or "gdn" in name else "silicon")
            for name in names
        ]

    def evaluate_generation_ops(
        self, places: list[int], **_: int
    ) -> list[tuple[str, float, float, str]]:
        return [self.rows[i] for i in places]

    evaluate_context_ops = evaluate_generation_ops


def times_with(
    tag: str, state_kernel: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> aiconfigurator.KernelTimes:
    """The kernel times of Nemotron-3-Nano from a database with one kernel of its states."""
    kinds = [
        ("Gemm", "qkv_gemm"),
        state_kernel,
        ("GenerationAttention", "attention"),
        ("Gemm", "logits_gemm"),
    ]
    operations = [(kind, f"generation_{name}") for kind, name in kinds]
    compiled = aiconfigurator.Compiled(
        Handle([name for _, name in operations], tag), operations, operations
    )
    monkeypatch.setattr(aiconfigurator, "engine_of", lambda *_, **__: compiled)
    return aiconfigurator.times_of(MODELS["nemotron-3-nano-30b-a3b"], "h100", EngineSetup(2))


def test_states_whose_kernels_were_not_measured_are_read_and_written_at_the_rooflines_bandwidth(
    monkeypatch,
):
    mamba = ("Mamba2", "mamba_ssm")
    measured, bound = (times_with(tag, mamba, monkeypatch) for tag in ("silicon", "sol"))
    shape, h100 = MODELS["nemotron-3-nano-30b-a3b"], gpu("h100")
    each_ms = (
        1e3 * 2 * shape.state_bytes / 2 / (0.8 * h100.memory_bytes_per_s)
    )  # of a sequence, on each of 2 GPUs
    added = np.array(aiconfigurator.DECODE_SEQUENCES)[:, None] * each_ms
    assert bound.decode_ms - measured.decode_ms == pytest.approx(
        np.broadcast_to(added, bound.decode_ms.shape)
    )
    assert (bound.prefill_ms - measured.prefill_ms)[1:] == pytest.approx(each_ms)
    assert bound.prefill_ms[0].max() == 0
    for times, says in ((measured, False), (bound, True)):
        found = aiconfigurator.profile_of(
            times, shape.name, "h100", EngineSetup(2), "a source"
        ).metadata
        assert ("states of linear layers not measured" in found.source) == says
        assert (
            "not measured, but at the source's speed of light: mamba_ssm" in found.notes
        ) == says


def test_states_that_were_not_measured_and_whose_work_is_not_known_are_refused(monkeypatch):
    assert times_with("silicon", ("Gdn", "gdn_recurrence"), monkeypatch).unmeasured == ()
    with pytest.raises(
        InputError, match="the kernel gdn_recurrence of nemotron-3-nano-30b-a3b was not measured"
    ):
        times_with("sol", ("Gdn", "gdn_recurrence"), monkeypatch)


def test_an_eagle_drafter_of_a_mixture_of_experts_has_one_mlp():
    shape = MODELS["qwen3-30b-a3b"]
    bytes_of = eagle_drafts(shape, gpu("h200")).weight_bytes_per_gpu
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    assert bytes_of == 2 * (attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden**2)


# ---------------------------------------------------------------- aiconfigurator and aisimulate


def package(name: str) -> None:
    pytest.importorskip(
        f"{aiconfigurator.PACKAGES[name]}.sdk.engine", reason="the extra is not installed"
    )


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-30b-a3b_h100_tp2_ep2",
        "gpt-oss-120b_h100_tp2_w4a16_mxfp4",
    ],
)
def test_a_shipped_mixture_of_experts_is_remade_byte_for_byte(tmp_path, name: str):
    package("aiconfigurator")
    m = read_profile(FOLDER / f"{name}.parquet").metadata
    setup = EngineSetup(m.tp, m.dp, m.ep, m.precision, m.kv_precision, m.routing)
    write_profile(aiconfigurator.derive(MODELS[m.model], m.gpu, setup), tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (FOLDER / f"{name}.parquet").read_bytes()


def test_an_fp8_block_profile_is_remade_from_aisimulate(tmp_path):
    package("aisimulate")
    name = "qwen3-30b-a3b_h100_tp2_ep2_fp8-block.parquet"
    setup = EngineSetup(2, 1, 2, "fp8-block", package="aisimulate")
    write_profile(aiconfigurator.derive(MODELS["qwen3-30b-a3b"], "h100", setup), tmp_path / name)
    assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_a_profile_of_experts_agrees_with_aiconfigurator(tmp_path):
    package("aiconfigurator")
    shape, setup = MODELS["qwen3-30b-a3b"], EngineSetup(1, 8, 8)
    profile, engine = (
        aiconfigurator.derive(shape, "h100", setup),
        aiconfigurator.engine_of(shape, "h100", setup).handle,
    )
    for batch in (1, 16, 64, 256):
        expected = 1e-3 * engine.predict_decode_latency(batch, 1024, 2)
        # up to 4 % above, where its kernel finds the KV caches of one layer in level 2
        assert 0.98 * expected < profile.decode_s(batch, 1025) < 1.04 * expected


def test_an_even_load_of_experts_is_faster_than_an_uneven_one_where_they_compute():
    package("aiconfigurator")
    shape = MODELS["qwen3-30b-a3b"]
    uneven, even = (
        aiconfigurator.derive(shape, "h100", EngineSetup(1, 8, 8, routing=routing))
        for routing in ("power law 1.2", "balanced")
    )
    assert even.metadata.routing == "balanced" and even.prefill_s(8192) < uneven.prefill_s(8192)


def test_an_exchange_beyond_a_node_comes_from_link_rates_and_says_so():
    package("aiconfigurator")
    shape = MODELS["qwen3-30b-a3b"]
    profile = aiconfigurator.derive(shape, "h100", EngineSetup(1, 16, 16))
    assert "from link rates" in profile.metadata.notes
    times = aiconfigurator.times_of(shape, "h100", EngineSetup(1, 16, 16))
    ms, tokens = times.experts_ms["moe_post_dispatch"], times.tokens
    slope = (ms[-1] - ms[0]) / (tokens[-1] - tokens[0])
    assert slope == pytest.approx(
        1e3 * 2 * shape.layers * shape.hidden * 15 / gpu("h100").bytes_per_s_among(16)
    )


@pytest.mark.parametrize(
    ("model", "setup", "message"),
    [
        (
            "qwen3-30b-a3b",
            EngineSetup(2, 1, 4),
            "--ep 4: experts are shared by all 2 GPUs of tp × dp or by none; give 2 or 1",
        ),
        (
            "gpt-oss-20b",
            EngineSetup(3, 1, 3),
            "--ep 3 does not divide the 32 experts of gpt-oss-20b",
        ),
        (
            "qwen3-8b",
            EngineSetup(1, 2),
            "qwen3-8b has no experts: --dp and --ep are for mixtures of experts",
        ),
        (
            "qwen3-8b",
            EngineSetup(precision="w4a16_mxfp4"),
            "w4a16_mxfp4 is a precision of experts alone",
        ),
        (
            "qwen3-8b",
            EngineSetup(precision="fp8-block"),
            "timed without CUDA graphs.*use --source aisimulate",
        ),
        (
            "glm-4.5",
            EngineSetup(8, 1, 8),
            "as its shared_intermediate, dense_layers are not those of a model that it knows",
        ),
        (
            "qwen3-next-80b-a3b",
            EngineSetup(4),
            "as its .*linear_layers.* are not those of a model that it knows",
        ),
    ],
)
def test_what_nobody_measured_is_refused_in_a_line_with_and_without_the_package(
    model: str, setup: EngineSetup, message: str
):
    with pytest.raises(InputError, match=message):
        aiconfigurator.derive(MODELS[model], "h100", setup)
