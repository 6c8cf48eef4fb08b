"""A launch as simrl can simulate it: what was changed for that is listed."""

import pytest

from simrl.launch.fit import fit
from simrl.scenario.dotted import get
from tests.launch.reading import COMPLETE, translation

BIG = COMPLETE.replace("Qwen3-0.6B", "Qwen3-32B")


def fitted(folder, text, **given):
    made = translation(folder, text, **given)
    before = made.data
    fit(made)
    return made, before


def test_a_launch_that_fits_is_not_changed(tmp_path):
    made, before = fitted(tmp_path, COMPLETE)
    assert {**made.data, "systems": 0} == {**before, "systems": 0}
    assert made.data["systems"][0] == before["systems"][0]
    assert not made.changed


def test_systems_beside_a_launch_get_a_share_of_the_gpus_that_can_be_simulated(tmp_path):
    made, _ = fitted(tmp_path, COMPLETE)
    shares = {one["name"]: one.get("rollout_share") for one in made.data["systems"]}
    assert shares == {"verl_colocated": None, "one_step_off": 0.5, "areal": 0.5}


def test_systems_that_the_gpus_do_not_allow_are_dropped(tmp_path):
    text = COMPLETE.replace("n_gpus_per_node=8", "n_gpus_per_node=1")
    text += " actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    made, _ = fitted(tmp_path, text)
    assert [one["name"] for one in made.data["systems"]] == ["verl_colocated"]


def changes(made, before):
    """Return the changed fields by name, with what is listed for each."""
    listed = {one.field: one for one in made.changed}
    for field, one in listed.items():
        assert get(made.data, field) == one.value != get(before, field)
        assert one.option
    return listed


def test_a_launch_that_needs_more_memory_gets_a_larger_gpu_where_none_is_given(tmp_path):
    made, before = fitted(tmp_path, f"{BIG} actor_rollout_ref.rollout.tensor_model_parallel_size=1")
    listed = changes(made, before)
    assert "cluster.gpu" in listed
    assert "as written: " in listed["cluster.gpu"].what


def test_a_gpu_that_is_given_is_not_changed(tmp_path):
    made, before = fitted(
        tmp_path,
        f"{BIG} actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        **{"cluster.gpu": "h100"},
    )
    assert get(made.data, "cluster.gpu") == "h100"
    assert "cluster.gpu" not in changes(made, before)
    assert changes(made, before) or made.notes


def test_a_launch_that_cannot_be_simulated_has_the_reason_in_a_note(tmp_path):
    text = COMPLETE.replace("Qwen3-0.6B", "Qwen3-235B-A22B")
    made, before = fitted(tmp_path, text, **{"cluster.gpu": "a100"})
    assert made.data == before
    assert any(note.startswith("simrl compare refuses it as it stands: ") for note in made.notes)


@pytest.mark.parametrize("field", ["cluster.ep", "training.expert_parallel"])
def test_expert_parallelism_of_a_model_without_experts_is_left_out_and_listed(tmp_path, field):
    made, _ = fitted(tmp_path, COMPLETE, **{field: 8})
    assert get(made.data, field) == 1
    assert any("no experts" in one.what for one in made.changed)


def test_expert_parallelism_that_does_not_divide_the_experts_is_lowered_and_listed(tmp_path):
    text = COMPLETE.replace("Qwen3-0.6B", "Qwen3-30B-A3B")
    made, _ = fitted(tmp_path, text, **{"training.expert_parallel": 12})
    assert get(made.data, "training.expert_parallel") == 4
    assert any("has 128 experts" in one.what for one in made.changed)
