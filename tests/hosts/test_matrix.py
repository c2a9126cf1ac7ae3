"""Every preset under every option of DDP, in the phase that the preset is for, in four real processes."""

import pytest

from support import matrix_cases
from support.matrix_cases import OPTIONS, STEPS
from tersegrad.specs import PRESETS

SHORT_TOPK4 = (
    "ErrorFeedback(Schedule(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))), 'ratio', steps={0: 0.25, 2: 0.03}))"
)
# Presets that begin otherwise than they go on, with a short beginning; and the steps that they need.
IN_PHASE = {
    "auto": ("Auto({'topk': AllGather(TopK(0.02)), 'bf16': AllReduce(BF16())}, warmup=1, trial=3)", 12),
    "gradiveq": ("GradiVeQ(warmup=1, learn=3, compress=50, worst=None, drift=None, tiny=0, linear=True)", 7),
    "topk4": (SHORT_TOPK4, STEPS),
    "ahead": (f"StepAhead({SHORT_TOPK4})", STEPS),
    "dgc": (
        "MomentumCorrection(Schedule(AllGather(PerTensor(SampledTopK(0.01))), 'ratio', steps={0: 0.25, 2: 0.01}))",
        STEPS,
    ),
}
# One of each kind; the others are in the slow tier.
USUAL = (
    "none",
    "bf16",
    "auto",
    "sidco",
    "vgc",
    "fft",
    "gradiveq",
    "topk4",
    "ahead",
    "dgc",
    "signum",
    "int8",
    "powersgd",
)


@pytest.mark.parametrize("names", [USUAL, pytest.param(sorted({*PRESETS} - {*USUAL}), marks=pytest.mark.slow)])
def test_every_preset_under_every_option_of_ddp(gloo4, names):
    specs = dict(IN_PHASE.get(name, (name, STEPS)) for name in names)
    for spec, steps in specs.items():
        results = gloo4.run(matrix_cases.under_all_options, {spec: steps})
        for spec, by_option in results[0].items():
            assert set(by_option) == {option.__name__ for option in OPTIONS} | {"subgroup"}
            for option, digest in by_option.items():
                others = [found[spec][option] for found in results[1:]]
                assert digest != "not finite", f"{spec}, {option}"
                assert others == [digest, digest, "outside" if option == "subgroup" else digest], f"{spec}, {option}"
