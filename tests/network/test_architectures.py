"""Networks of timm and torchvision with random weights: linearised, and learned from in both ways.

They need the extra `architectures`. All are small, or made small, and images have few pixels.
"""

import copy

import pytest
import torch

from dlcft import Learner, Linearized
from tests.support.directions import close, directional, set_delta
from tests.support.networks import needs, randomize_norms

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other libraries

SHALLOW = {"layers": (1, 1, 1, 1)}
TWO_BLOCKS = {"depth": 2, "img_size": 32}
WINDOWS = {"img_size": 64, "window_size": 2, "embed_dim": 24, "depths": (2, 2), "num_heads": (3, 6)}
TIMM = {  # name: pixels, and settings that make it small
    "beit_base_patch16_224": (32, TWO_BLOCKS),
    "botnet26t_256": (64, {"img_size": 64}),
    "caformer_s18": (32, {}),
    "cait_xxs24_224": (32, TWO_BLOCKS),
    "coat_lite_tiny": (32, {"img_size": 32}),  # one module under several names
    "coatnet_pico_rw_224": (64, {"img_size": 64}),
    "convit_tiny": (32, TWO_BLOCKS),
    "convnext_atto": (32, {}),
    "convnextv2_atto": (32, {}),
    "cspresnet50": (32, {}),
    "davit_tiny": (32, {"depths": (1, 1, 1, 1)}),
    "deit_tiny_distilled_patch16_224": (32, TWO_BLOCKS),
    "densenet121": (32, {"block_config": (2, 2, 2, 2)}),
    "dla34": (32, {}),
    "dpn48b": (32, {}),
    "eca_nfnet_l0": (32, {}),
    "ecaresnet50t": (32, SHALLOW),
    "edgenext_xx_small": (64, {}),
    "efficientformerv2_s0": (64, {"img_size": 64}),
    "efficientnet_b0": (32, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "eva02_tiny_patch14_224": (28, {"depth": 2, "img_size": 28}),
    "fastvit_t8": (64, {}),
    "gcvit_xxtiny": (64, {"img_size": 64}),
    "ghostnet_050": (32, {}),
    "gmlp_ti16_224": (32, {"img_size": 32}),
    "hiera_tiny_224": (64, {"img_size": 64}),
    "hrnet_w18_small": (64, {}),
    "inception_v3": (96, {}),
    "lambda_resnet26t": (64, {}),
    "lcnet_050": (32, {}),
    "levit_128s": (64, {"img_size": 64}),
    "mambaout_femto": (32, {}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "mobilenetv2_035": (32, {}),
    "mobilenetv3_small_050": (32, {}),
    "mobilenetv4_conv_small": (32, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "pit_ti_224": (64, {"img_size": 64}),
    "poolformer_s12": (32, {}),
    "pvt_v2_b0": (32, {}),
    "regnety_002": (32, {}),
    "repvgg_a0": (32, {}),
    "repvit_m0_9": (32, {}),
    "res2net50_26w_4s": (32, SHALLOW),
    "resmlp_12_224": (32, {"img_size": 32}),
    "resnest14d": (32, {}),
    "resnet18": (64, {}),
    "resnet50_gn": (32, SHALLOW),
    "resnetv2_50": (32, SHALLOW),
    "resnext50_32x4d": (32, SHALLOW),
    "rexnet_100": (32, {}),
    "sequencer2d_s": (32, {"img_size": 32}),
    "seresnet50": (32, SHALLOW),
    "shvit_s1": (64, {}),
    "skresnet18": (32, {}),
    "starnet_s1": (32, {}),
    "swin_tiny_patch4_window7_224": (64, WINDOWS),
    "swinv2_tiny_window8_256": (64, WINDOWS),
    "tf_efficientnetv2_b0": (32, {}),
    "tiny_vit_5m_224": (64, {}),
    "tnt_s_patch16_224": (32, TWO_BLOCKS),
    "visformer_tiny": (64, {"img_size": 64}),
    "vit_relpos_small_patch16_224": (32, TWO_BLOCKS),
    "vit_small_patch14_reg4_dinov2": (28, {"depth": 2, "img_size": 28}),
    "vit_small_patch16_dinov3": (32, TWO_BLOCKS),
    "vit_tiny_patch16_224": (32, TWO_BLOCKS),
    "xcit_nano_12_p16_224": (32, {"img_size": 32}),
}
TORCHVISION = {
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_y_400mf": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (64, {}),
    "swin_v2_t": (32, {}),
}


def build(library, name):
    """The network in evaluation mode, no parameter zero, and the size of its images."""
    package = needs(library)
    torch.manual_seed(0)
    if library == "timm":
        size, settings = TIMM[name]
        network = package.create_model(name, num_classes=0, **settings)
    else:
        size, settings = TORCHVISION[name]
        network = package.models.get_model(name, weights=None, **settings)
    for p in network.parameters():
        if p.dim() < 2 or not p.any():
            p.data.add_(0.1 * torch.randn(p.shape))
    return randomize_norms(network).eval(), size


@pytest.mark.parametrize(
    ("library", "name"), [*(("timm", name) for name in TIMM), *(("torchvision", name) for name in TORCHVISION)]
)
def test_linearises_and_learns(library, name):
    network, size = build(library, name)
    double = copy.deepcopy(network).double()
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    linear = Linearized(double)
    delta = set_delta(linear, scale=0.01)
    with torch.no_grad():
        value, change = linear.split(x)
    expected = directional(double, delta, x, step=1e-7)
    assert close(value, copy.deepcopy(double)(x), 1e-10)
    assert (change - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert change.abs().max() > 1e-3 * value.abs().max()

    images, labels = torch.randn(4, 3, size, size), [0, 1, 0, 1]
    for method, settings in (
        ("tangent", {"tangent_features": 1500}),
        ("dlcft-exact", {"depth_features": 1500}),
        ("dlcft", {"epochs": 1}),
    ):
        learner = Learner(network, method, **settings)
        learner.learn((images, labels))
        assert learner.outputs(images).isfinite().all(), method
