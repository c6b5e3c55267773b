"""Fixtures that tests of terra-serve share: `pytest_plugins = ["serving_fixtures"]`."""

import pytest
from tiny_serving import Served, scene_folder


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return scene_folder(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def server(tiny_model, tiny_tokenizer, scenes, tmp_path_factory):
    with Served(tiny_model, tiny_tokenizer, scenes, tmp_path_factory.mktemp("data")) as served:
        yield served
