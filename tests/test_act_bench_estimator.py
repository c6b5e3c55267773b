"""The ACT-Estimator: its published size and layout, the parts that were trained with, and files that are not it."""

import json
import math

import pytest
import torch
from tiny_act_bench import TINY, save_estimator, write_estimator
from torch import nn
from torch.nn import functional as F

from terra.act_bench.estimator import (
    ActEstimator,
    ActEstimatorConfig,
    _CrossAttention,
    _MemoryReader,
    _PathDecoder,
    _SinePositions,
)
from terra.act_bench.i3d import CHANNELS, inception_i3d, pad_same
from terra.errors import CheckpointError, EngineError

pytestmark = pytest.mark.slow

# The published model card and file list: 20,405,547 parameters, a file of 82.1 MB, a config.json of 487 bytes.
PARAMETERS, FILE_MEGABYTES, CONFIG_BYTES = 20_405_547, 82.1, 487


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_estimator(tmp_path_factory.mktemp("models") / "estimator")


def clips(config, count=2):
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, config.num_frames, config.side, config.side)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


class TestPublishedLayout:
    def test_parameters_and_names(self):
        with torch.device("meta"):
            model = ActEstimator(ActEstimatorConfig())
        assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        assert len(shapes) == 405
        expected = {
            "backbone.Conv3d_1a_7x7.conv3d.weight": (64, 3, 7, 7, 7),
            "backbone.Conv3d_2c_3x3.bn.running_var": (192,),
            "backbone.Mixed_3b.b0.conv3d.weight": (64, 192, 1, 1, 1),
            "backbone.Mixed_4f.b1b.conv3d.weight": (320, 160, 3, 3, 3),
            "backbone.Mixed_5c.b3b.conv3d.weight": (128, 832, 1, 1, 1),
            "squeeze_linear.weight": (512, 1024),
            "positional_encoding.pe": (1, 176, 512),
            "self_attn.layers.1.self_attn.in_proj_weight": (1536, 512),
            "self_attn.layers.0.linear1.weight": (512, 512),
            "self_attn.layers.0.norm2.bias": (512,),
            "classifier.0.weight": (512, 512),
            "classifier.3.weight": (9, 512),
            "visual_odmetry.hidden_state": (1, 512),
            "visual_odmetry.pos_embedding": (1, 176, 512),
            "visual_odmetry.pre_gru_layer.self_attention.out_proj.weight": (512, 512),
            "visual_odmetry.pre_gru_layer.cross_attention.query_proj.bias": (512,),
            "visual_odmetry.pre_gru_layer.ffn.linear1.weight": (256, 512),
            "visual_odmetry.gru.weight_ih": (1536, 515),
            "visual_odmetry.head.0.weight": (256, 512),
            "visual_odmetry.head.3.weight": (2, 256),
        }
        assert expected == {name: shapes.get(name) for name in expected}

    @pytest.mark.slow
    def test_the_published_size_loads_and_looks_at_a_video(self, tmp_path):
        config = ActEstimatorConfig()
        folder = save_estimator(tmp_path / "estimator", config)
        assert round((folder / "model.safetensors").stat().st_size / 1e6, 1) == FILE_MEGABYTES
        text = json.dumps(json.loads((folder / "config.json").read_text()), indent=2, sort_keys=True) + "\n"
        assert len(text) == CONFIG_BYTES  # what is written here has all that the published file has
        model = ActEstimator.from_pretrained(folder)
        assert model.config == config
        estimates = model.estimate(clips(config, 1), torch.float32)
        assert estimates.commands.shape == (1, 9)
        assert estimates.waypoints.shape == (1, 44, 2)
        assert estimates.waypoints.dtype == torch.float32
        assert estimates.waypoints.isfinite().all()
        assert (estimates.waypoints[:, 0] == 0).all()


class TestParts:
    def test_the_backbone_halves_as_tensorflow_does(self):
        with torch.device("meta"):
            features = inception_i3d().eval()(torch.zeros(1, 3, 44, 224, 224))
        assert features.shape == (1, CHANNELS, 11, 7, 7)

    @pytest.mark.parametrize("size", range(1, 12))
    @pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (2, 2), (3, 1), (1, 1)])
    def test_same_padding_gives_size_by_stride_rounded_up(self, size, kernel, stride):
        x = torch.arange(1.0, size + 1).view(1, 1, 1, 1, size)
        padded = pad_same(x, (1, 1, kernel), (1, 1, stride)).flatten().tolist()
        windows = [padded[start : start + kernel] for start in range(0, len(padded) - kernel + 1, stride)]
        assert len(windows) == math.ceil(size / stride)
        front, back = padded.index(1.0), len(padded) - padded.index(float(size)) - 1
        assert 0 <= back - front <= 1 or back == front

    def test_cross_attention_is_multi_head_attention(self):
        torch.manual_seed(0)
        ours, theirs = _CrossAttention(32, 4), nn.MultiheadAttention(32, 4, batch_first=True)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(
                torch.cat([p.weight for p in (ours.query_proj, ours.key_proj, ours.value_proj)])
            )
            theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.query_proj, ours.key_proj, ours.value_proj)]))
            theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
        query, memory = torch.randn(2, 1, 32), torch.randn(2, 7, 32)
        torch.testing.assert_close(ours(query, memory), theirs(query, memory, memory)[0])

    def test_the_state_reads_before_the_memory_reads_itself(self):
        torch.manual_seed(0)
        reader = _MemoryReader(16, 2)
        state, memory = torch.randn(2, 16), torch.randn(2, 5, 16)
        normed = F.layer_norm(memory, (16,), reader.pre_norm1.weight, reader.pre_norm1.bias)
        x = memory + reader.cross_attention(state.unsqueeze(1), normed).repeat(1, 5, 1)
        normed = F.layer_norm(x, (16,), reader.pre_norm0.weight, reader.pre_norm0.bias)
        x = x + reader.self_attention(normed, normed, normed)[0]
        normed = F.layer_norm(x, (16,), reader.pre_norm2.weight, reader.pre_norm2.bias)
        x = x + F.linear(F.gelu(F.linear(normed, *reader.ffn.linear1.parameters())), *reader.ffn.linear2.parameters())
        torch.testing.assert_close(reader(state, memory), x)

    def test_sine_positions(self):
        positions = _SinePositions(11, 8)(torch.zeros(1, 11, 8))[0]
        for place in range(11):
            for pair in range(4):
                angle = place / 10000 ** (2 * pair / 8)
                expected = [math.sin(angle), math.cos(angle)]
                assert positions[place, 2 * pair : 2 * pair + 2].tolist() == pytest.approx(expected, abs=1e-6)

    def test_the_memory_is_cut_anew_without_moving_the_channels(self, tiny):
        model = ActEstimator.from_pretrained(tiny)
        seen = {}
        model.backbone.register_forward_hook(lambda _module, _args, out: seen.update(features=out))
        model.squeeze_linear.register_forward_pre_hook(lambda _module, args: seen.update(memory=args[0]))
        model.estimate(clips(TINY), torch.float32)
        pooled = nn.AdaptiveAvgPool3d((11, 4, 4))(seen["features"])
        assert seen["memory"].shape == (2, 176, 1024)
        for index in (0, 1023, 1024, 150_000):
            assert (seen["memory"].flatten(1)[:, index] == pooled.flatten(1)[:, index]).all()

    def test_each_step_is_told_the_last_place_and_its_time(self, tiny):
        model = ActEstimator.from_pretrained(tiny)
        told = []
        model.visual_odmetry.gru.register_forward_pre_hook(lambda _module, args: told.append(args[0]))
        waypoints = model.estimate(clips(TINY), torch.float32).waypoints
        inputs = torch.stack(told, dim=1)
        assert inputs.shape == (2, 43, 2 + 32 + 1)
        torch.testing.assert_close(inputs[..., :2], waypoints[:, :-1])
        torch.testing.assert_close(inputs[0, :, -1], torch.linspace(0, 4.3, 44)[:-1])

    def test_the_path_is_a_sum_of_learnt_steps(self):
        torch.manual_seed(0)
        decoder = _PathDecoder(ActEstimatorConfig(num_frames=4, d_model=16, num_heads=2)).eval()
        memory = torch.randn(2, 16, 16)
        state, path = decoder.hidden_state.repeat(2, 1), [torch.zeros(2, 2)]
        for index in range(3):
            seen = decoder.pre_gru_layer(state, memory + decoder.pos_embedding).sum(dim=1) / 16
            state = decoder.gru(torch.cat([path[-1], seen, torch.full((2, 1), index * 0.1)], dim=1), state)
            path.append(path[-1] + decoder.head(state))
        torch.testing.assert_close(decoder(memory), torch.stack(path, dim=1))

    def test_numbers_that_are_not_finite_are_refused(self, tiny):
        model = ActEstimator.from_pretrained(tiny)
        model.classifier[3].bias[4] = math.nan
        with pytest.raises(EngineError, match="expected finite numbers"):
            model.estimate(clips(TINY), torch.float32)

    def test_estimates_do_not_depend_on_the_batch(self, tiny):
        model = ActEstimator.from_pretrained(tiny)
        videos = clips(TINY)
        together, alone = model.estimate(videos, torch.float32), model.estimate(videos[1:], torch.float32)
        torch.testing.assert_close(together.commands[1:], alone.commands)
        torch.testing.assert_close(together.waypoints[1:], alone.waypoints)
        assert (together.commands[0] != together.commands[1]).any()


class TestFiles:
    def test_with_and_without_the_wrappers_name(self, tiny, tmp_path):
        plain = save_estimator(tmp_path / "plain", prefix="")
        ours, theirs = ActEstimator.from_pretrained(tiny), ActEstimator.from_pretrained(plain)
        assert not ours.training
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), name

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"model_type": "llama"}, "expected the model_type ACT-Estimator, got 'llama'"),
            ({"num_heads": None}, "num_heads: expected a whole number from 1 to 256, got none"),
            ({"input_shape": [3, 44, 28]}, r"input_shape\[3\]: expected a whole number from 1 to 1024, got none"),
            ({"input_shape": [3, 25, 28, 28]}, "input_shape: expected"),
            ({"timestamp_dim": 0}, "timestamp_dim: expected 1, got 0"),
            ({"d_model": 33}, "d_model: expected a multiple of 2 num_heads = "),
            ({"d_model": "wide"}, "d_model: expected a whole number from 1 to 8192, got 'wide'"),
            ({"num_heads": 0}, "num_heads: expected a whole number from 1 to 256, got 0"),
            ({"feature_map_size": True}, "feature_map_size: expected a whole number from 1 to 16, got True"),
            ({"num_classes": 8}, "of another shape: model.classifier.3.weight"),
        ],
    )
    def test_other_configurations_are_refused(self, tmp_path, changes, expected):
        folder = save_estimator(tmp_path / "estimator", **changes)
        with pytest.raises(CheckpointError, match=expected) as caught:
            ActEstimator.check(folder)
        assert "\n" not in str(caught.value)

    def test_a_missing_tensor_is_named(self, tmp_path):
        tensors = {f"model.{name}": tensor for name, tensor in ActEstimator(TINY).state_dict().items()}
        del tensors["model.classifier.3.bias"]
        write_estimator(tmp_path, TINY, tensors)
        with pytest.raises(CheckpointError, match=r"1 missing: model\.classifier\.3\.bias"):
            ActEstimator.check(tmp_path)

    def test_a_pickle_is_not_read(self, tmp_path):
        save_estimator(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "ckpt.pth")
        with pytest.raises(CheckpointError, match="pickled weights are not read"):
            ActEstimator.check(tmp_path)

    def test_a_pointer_is_no_file(self, tmp_path):
        save_estimator(tmp_path)
        (tmp_path / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
        )
        with pytest.raises(CheckpointError, match="Git LFS pointer"):
            ActEstimator.check(tmp_path)
