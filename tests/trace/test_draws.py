"""Draws for arrays of keys, and their twins in compiled code."""

import numpy as np
import pytest

from simrl.speculation.acceptance import sample_key
from simrl.speculation.draws import mixed as compiled_mixed, uniform
from simrl.trace.draws import mixed, uniforms


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_arrays_of_keys_draw_what_compiled_code_draws_for_each(seed: int):
    prompts, epochs = np.array([0, 5, 2**31 - 1]), np.array([3, 0, 9], np.int32)
    keys = mixed(seed, prompts, epochs, epochs).view(np.int64).tolist()
    rows = list(zip(prompts.tolist(), epochs.tolist(), strict=True))
    assert keys == [sample_key(seed, prompt, epoch, epoch) for prompt, epoch in rows]
    drawn = uniforms(seed, prompts, epochs).tolist()
    assert drawn == [uniform(compiled_mixed(seed, prompt), epoch) for prompt, epoch in rows]
