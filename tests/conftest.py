"""What several test files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real measurements beside the checkout. They are no part of the project: without them, tests are skipped."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the measurements that nobody in this project made are not beside this checkout (../shared/data)")
    return folder
