"""Presets: one-word names for specs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A one-word name for a spec."""

    group: str
    spec: str
    meaning: str


PLAIN, PAPERS, PUBLISHED, SPARSE, QUANTISED, LOW_RANK = (
    "Plain",
    "The four papers",
    "By the papers' own rules",
    "Sparse",
    "Quantised",
    "Low rank",
)

PRESETS = {
    "none": Preset(PLAIN, "Dense()", "plain float32 all-reduce, as DDP does it"),
    "bf16": Preset(PLAIN, "AllReduce(BF16())", "half the bytes, summed in bfloat16; the strongest plain baseline"),
    "fp16": Preset(PLAIN, "AllReduce(FP16())", "half the bytes, summed in float16"),
    "auto": Preset(PLAIN, "Auto()", "tries methods in the first steps and keeps the fastest; dense where that is best"),
    "sidco": Preset(
        PAPERS,
        "ErrorFeedback(AllGather(SIDCo(ratio=0.01)))",
        "about 1 % above a fitted threshold (SIDCo-E), with error feedback",
    ),
    "sidco-paper": Preset(
        PUBLISHED,
        "ErrorFeedback(AllGather(SIDCo(ratio=0.01, rule='paper')))",
        "SIDCo-E by the authors' own rule: fixed shares, stages adapted every 5 steps, nothing else holds the count",
    ),
    "vgc": Preset(PAPERS, "ErrorFeedback(VGC(alpha=1.5))", "an element when its samples agree; the rest waits"),
    "vgc-paper": Preset(
        PUBLISHED,
        "ErrorFeedback(VGC(alpha=1.5, rule='paper'))",
        "VGC as printed: 32-bit words, powers below the tensor's largest, all that passes the test leaves the residual",
    ),
    "fft": Preset(
        PAPERS,
        "ErrorFeedback(Schedule(AllGather(FFT(theta=0.9, values=RangeFloat(bits=6), order='channels_last')), 'theta', "
        "steps={0: 0.7, 200: 0.9}))",
        "the largest 10 % of the frequencies in 6 bits, 30 % in the first 200 steps, with error feedback",
    ),
    "fft-paper": Preset(
        PUBLISHED,
        "AllGather(PerTensor(FFT(theta=0.85, values=RangeFloat(bits=10, mantissa=5, low=-1.0, high=1.0, "
        "rounding='truncate'), rule='paper')))",
        "each tensor's half spectrum as a whole, in float16; truncated 10-bit floats within [-1, 1], a bitmap",
    ),
    "gradiveq": Preset(
        PAPERS,
        "ErrorFeedback(GradiVeQ(learn=60, compress=240, warmup=20, learning=TwoShot(QSGD(bits=4)), linear=True))",
        "slices of convolutions and matrices in a learnt basis, 4 bits an element while it learns",
    ),
    "gradiveq-paper": Preset(
        PUBLISHED,
        "GradiVeQ(slice_size=4096, loss=0.01, learning=Ring(QSGD(bits=4)), rule='paper')",
        "GradiVeQ as published: first slice, every worker fits, pipelined ring; uncompressed for 2,500 steps",
    ),
    "topk": Preset(
        SPARSE, "ErrorFeedback(AllGather(TopK(ratio=0.01)))", "the largest 1 % of each bucket, with error feedback"
    ),
    "topk8": Preset(
        SPARSE,
        "ErrorFeedback(AllGather(TopK(ratio=0.01, values=Blockwise())))",
        "as topk, with a byte for each value instead of four",
    ),
    "topk4": Preset(
        SPARSE,
        "ErrorFeedback(Schedule(AllGather(TopK(ratio=0.03, values=RangeFloat(bits=4))), 'ratio', "
        "steps={0: 0.25, 200: 0.03}))",
        "the largest 3 % in four bits each, 25 % in the first 200 steps: fewer bytes than topk, nearer to plain",
    ),
    "ahead": Preset(
        SPARSE,
        "StepAhead(ErrorFeedback(Schedule(AllGather(TopK(ratio=0.01, values=RangeFloat(bits=4))), 'ratio', "
        "steps={0: 0.25, 200: 0.01})))",
        "the largest 1 % in four bits each after the same beginning, gradients taken a step ahead; needs optimizer=",
    ),
    "dgc": Preset(
        SPARSE,
        "ByDimension({1: MomentumCorrection(Dense(), nesterov=True, masking=False)}, MomentumCorrection(Schedule("
        "AllGather(TopK(ratio=0.01)), 'ratio', steps={0: 0.25, 200: 0.01}), nesterov=True, masking=False))",
        "momentum before sending, 1 %, 25 % in the first 200 steps, vectors whole; for SGD without momentum of its own",
    ),
    "dgc-paper": Preset(
        PUBLISHED,
        "ByDimension({1: MomentumCorrection(Dense(), masking=False)}, MomentumCorrection(Schedule("
        "AllGather(PerTensor(SampledTopK(ratio=0.001))), 'ratio', "
        "steps={0: 0.25, 400: 0.0625, 800: 0.015625, 1200: 0.004, 1600: 0.001})))",
        "DGC as its authors train it: masked velocities, 25 % down to 0.1 % of each tensor in four epochs of 400 steps",
    ),
    "randomk": Preset(
        SPARSE,
        "ErrorFeedback(AllReduce(RandomK(ratio=0.01)))",
        "1 % drawn by lot, the same on all workers",
    ),
    "threshold": Preset(SPARSE, "ErrorFeedback(AllGather(Threshold(tau=0.01)))", "what exceeds a fixed threshold"),
    "redsync": Preset(
        SPARSE, "ErrorFeedback(AllGather(RedSync(ratio=0.01)))", "1 to 2 %, by a threshold that is found by halving"
    ),
    "gaussiank": Preset(
        SPARSE, "ErrorFeedback(AllGather(GaussianK(ratio=0.01)))", "about 1 %, by the threshold of a normal law"
    ),
    "strom": Preset(SPARSE, "ErrorFeedback(AllGather(Strom(tau=0.01)))", "signs of what exceeds a fixed threshold"),
    "qsgd": Preset(QUANTISED, "AllGather(QSGD(bits=4))", "stochastic rounding to 4 bits an element"),
    "signsgd": Preset(
        QUANTISED, "SignSGD()", "majority vote of signs, +-1: one bit each way; needs a small learning rate"
    ),
    "signum": Preset(QUANTISED, "SignSGD(momentum=0.9)", "majority vote of the signs of each worker's momentum, +-1"),
    "efsignsgd": Preset(
        QUANTISED,
        "ErrorFeedback(AllGather(PerTensor(ScaledSign())))",
        "signs times each tensor's mean magnitude, with error feedback",
    ),
    "onebit": Preset(
        QUANTISED, "ErrorFeedback(AllGather(OneBit()))", "signs with two means for every 1024 elements, error feedback"
    ),
    "terngrad": Preset(
        QUANTISED, "AllGather(PerTensor(TernGrad()))", "-s, 0 or s by chance, 1.6 bits an element, clipped at 2.5 sigma"
    ),
    "natural": Preset(QUANTISED, "AllGather(Natural())", "random rounding to powers of two, 9 bits an element"),
    "int8": Preset(
        QUANTISED, "ErrorFeedback(TwoShot(Blockwise()))", "8 bits an element in blocks of 2048, with error feedback"
    ),
    "powersgd": Preset(LOW_RANK, "ErrorFeedback(PowerSGD(rank=2))", "every matrix as a product of two thin ones"),
}
