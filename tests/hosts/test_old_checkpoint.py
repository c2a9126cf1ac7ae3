"""Checkpoints of version 0.1: training goes on to the bit, or they are refused with what to do."""

from support import old_checkpoint_cases


def test_states_of_version_0_1_are_taken_up(gloo4):
    for found in gloo4.run(old_checkpoint_cases.go_on)[:2]:
        assert len(found) == 13
        refused = found.pop("LowMemory(AllGather(TopK(0.1)))")
        assert "Load it with that version, call flush()" in refused["refused"]
        for spec, result in found.items():
            libraries = any(name in spec for name in ("powersgd", "GradiVeQ"))  # round as the processor's own do
            assert result["off"] <= (1e-5 if libraries else 1e-7), f"{spec}: {result}"
