"""Bounds, claims and parity of the GPU benchmark, and the presets that they count with."""
import re
import unittest

from bench_helpers import H200, PARAMS, ROOT  # first: it finds the others
import gpt_presets
import gpu_bounds
import gpu_claims
import gpu_modes
import gpu_parity
from gpu_run import Figures, RunError


class Presets(unittest.TestCase):
    def test_they_are_those_of_the_program(self):
        source = (ROOT / "models/gpt_presets.cpp").read_text()
        ours = {name: tuple(map(int, numbers.split(",")))
                for name, numbers in re.findall(r'Preset\{"([\w-]+)", ([\d, ]+)\}', source)}
        for name, shape in gpt_presets.PRESETS.items():
            self.assertEqual(ours[name], shape, name)

    def test_the_number_of_parameters_is_the_models(self):
        self.assertEqual(gpt_presets.num_params("gpt-1b4"), PARAMS)
        self.assertEqual(gpt_presets.num_params("gpt2-124m"), 163109376)


class Bounds(unittest.TestCase):
    def bound(self, mode, batch, rates=H200):
        forward_s, backward_s = {8: (0.039, 0.090), 32: (0.160, 0.375)}[batch]
        return gpu_bounds.bound_s(mode, PARAMS, forward_s, backward_s, rates)

    def test_resident_is_arithmetic_and_the_gpus_memory(self):
        self.assertAlmostEqual(self.bound("resident", 8), 0.129 + 28 * PARAMS / 4.3e12)

    def test_in_host_memory_the_best_split_is_bound_by_links_or_by_arithmetic(self):
        self.assertAlmostEqual(self.bound("host", 8), 0.297, delta=0.001)
        # Long enough for the copies: nothing but forward, backward and the GPU's share.
        self.assertAlmostEqual(self.bound("host", 32), 0.535 + 0.0065, delta=0.002)

    def test_on_nvme_the_disk_binds(self):
        for mode, per_param in (("nvme-optimizer", 24), ("nvme", 26), ("half", 12)):
            self.assertAlmostEqual(self.bound(mode, 8), per_param * PARAMS / 2.7e9)

    def test_a_faster_link_never_makes_a_bound_larger(self):
        for name in ("h2d_of_both", "d2h_of_both", "device", "adamw", "disk_mixed"):
            faster = gpu_bounds.Rates(**{**vars(H200), name: 3 * getattr(H200, name)})
            for mode in ("resident", "host", *gpu_modes.NVME_MODES):
                for batch in (8, 32):
                    self.assertLessEqual(self.bound(mode, batch, faster),
                                         self.bound(mode, batch) + 1e-9, (name, mode))

    def test_without_a_rate_there_is_no_bound_of_the_modes_that_need_it(self):
        rates = gpu_bounds.Rates.of({"device": 4e12, "adamw": 7e10, "disk_mixed": None, "gpu": "x"})
        self.assertIsNotNone(self.bound("resident", 8, rates))
        self.assertIsNone(self.bound("host", 8, rates))
        self.assertIsNone(self.bound("nvme", 8, rates))
        self.assertIsNone(gpu_bounds.bound_s("resident", PARAMS, None, None, H200))


class Claims(unittest.TestCase):
    def claims(self, figures, batches=(8, 32), preset="gpt-1b4", rates=H200, bits=None):
        return {claim.figure: claim
                for claim in gpu_claims.claims_of(figures, preset, batches, rates, bits)}

    def host(self, ours_s, **peers_s):
        figures = {("host", "tessera", 8): Figures(ours_s)}
        figures.update({("host", name, 8): Figures(s) for name, s in peers_s.items()})
        return self.claims(figures)

    def test_the_limits_are_those_that_were_asked_for(self):
        self.assertEqual([claim.asked for name, claim in self.claims({}).items()
                          if "batch 32" in name],
                         ["<= 1.02", "<= 0.66 s", ">= 1.75", ">= 0.85", ">= 0.85", ">= 0.9",
                          "<= 1.15", "<= 0.6", "11.4 to 12.6", "<= 16", "<= 1", "<= 1"] +
                         ["every bit"] * 4)
        self.assertEqual([claim.asked for name, claim in self.claims({}).items()
                          if "host, batch 8" in name][:2], ["<= 0.37 s", ">= 3"])

    def test_nothing_measured_is_nothing_known(self):
        self.assertEqual({claim.is_reached for claim in self.claims({}).values()}, {None})

    def test_another_preset_is_not_judged(self):
        self.assertEqual(self.claims({}, preset="gpt-7b"), {})

    def test_the_best_peer_is_the_faster_one(self):
        claim = self.host(0.37, deepspeed=1.2, fsdp2=1.1)["host, batch 8: x best peer"]
        self.assertIs(claim.is_reached, False)
        self.assertEqual(claim.measured, "2.97 (fsdp2)")
        claims = self.host(0.36, deepspeed=1.2, fsdp2=1.1)
        self.assertIs(claims["host, batch 8: x best peer"].is_reached, True)
        self.assertIs(claims["host, batch 8: step"].is_reached, True)

    def test_a_peer_that_did_not_run_leaves_the_best_peer_open_but_not_a_miss(self):
        claim = self.host(0.3, fsdp2=1.5)["host, batch 8: x best peer"]
        self.assertIsNone(claim.is_reached)
        self.assertEqual(claim.measured, "5.00 (fsdp2; without deepspeed)")
        self.assertIs(self.host(0.6, fsdp2=1.5)["host, batch 8: x best peer"].is_reached, False)

    def test_nvme_is_held_against_the_disk_and_the_modes_against_each_other(self):
        disk_s = 24 * PARAMS / 2.7e9
        claims = self.claims({("nvme-optimizer", "tessera", 8): Figures(disk_s / 0.95),
                              ("nvme", "tessera", 8): Figures(disk_s * 1.3),
                              ("half", "tessera", 8): Figures(disk_s * 0.6)})
        self.assertIs(claims["nvme-optimizer, batch 8: of the disk's mixed rate, at 24 B/param"]
                      .is_reached, True)
        self.assertIs(claims["nvme, batch 8: / nvme-optimizer"].is_reached, False)
        self.assertIs(claims["half, batch 8: / nvme-optimizer"].is_reached, True)

    def test_a_disk_that_slows_down_is_held_against_what_it_did_then(self):
        step_s = 24 * PARAMS / 2.0e9 / 0.95  # 0.95 of a rate of its own, 0.7 of the one at the start
        claims = self.claims({("nvme-optimizer", "tessera", 8): Figures(step_s, disk_mixed=2.0e9)})
        self.assertIs(claims["nvme-optimizer, batch 8: of the disk's mixed rate, at 24 B/param"]
                      .is_reached, True)

    def test_half_is_half_only_if_half_of_the_states_pass_the_disk(self):
        def moved(per_param):
            claims = self.claims({("half", "tessera", 8): Figures(
                1, nvme_read_bytes=per_param * PARAMS / 2, nvme_written_bytes=per_param * PARAMS / 2)})
            return claims["half, batch 8: NVMe bytes per parameter"].is_reached
        self.assertEqual([moved(b) for b in (11.0, 11.5, 12.0, 12.5, 13.4)],
                         [False, True, True, True, False])

    def test_speed_in_host_memory_is_held_against_both_resident_runs(self):
        claims = self.claims({("resident", "plain", 32): Figures(0.54),
                              ("resident", "tessera", 32): Figures(0.50),
                              ("host", "tessera", 32): Figures(0.60)})
        name = "host, batch 32: share of {} resident's speed"
        self.assertIs(claims[name.format("plain PyTorch")].is_reached, True)
        self.assertIs(claims[name.format("Tessera")].is_reached, False)

    def test_the_gpus_peak_is_held_against_each_peer_that_ran(self):
        claims = self.claims({("host", "tessera", 8): Figures(1, device_peak_bytes=20e9),
                              ("host", "fsdp2", 8): Figures(1, device_peak_bytes=21e9)})
        self.assertIs(claims["host, batch 8: GPU peak / fsdp2's"].is_reached, True)
        self.assertIsNone(claims["host, batch 8: GPU peak / deepspeed's"].is_reached)
        claims = self.claims({("host", "tessera", 8): Figures(1, device_peak_bytes=20e9),
                              ("host", "deepspeed", 8): Figures(1, device_peak_bytes=19e9)})
        self.assertIs(claims["host, batch 8: GPU peak / deepspeed's"].is_reached, False)

    def test_host_memory_is_counted_above_the_resident_run(self):
        def held(per_param):
            claims = self.claims({
                ("resident", "tessera", 8): Figures(1, host_peak_bytes=5e9),
                ("host", "tessera", 8): Figures(1, host_peak_bytes=5e9 + per_param * PARAMS)})
            return claims["host, batch 8: host bytes per parameter above resident"]
        self.assertIs(held(15.9).is_reached, True)
        self.assertIs(held(16.1).is_reached, False)

    def test_one_bit_of_a_norm_is_a_difference(self):
        def same(norms):
            claims = self.claims({}, bits={
                ("resident", "tessera", 8): Figures(1, losses=(3.0, 2.0), grad_norms=(0.5, 0.25)),
                ("half", "tessera", 8): Figures(1, losses=(3.0, 2.0), grad_norms=norms)})
            return claims["half, batch 8: losses and norms of resident"]
        self.assertIs(same((0.5, 0.25)).is_reached, True)
        self.assertIs(same((0.5,)).is_reached, True)  # fewer steps with NVMe: as far as both go
        self.assertEqual(same((0.5, 0.25 + 2**-53)).measured, "step 1 differs")
        self.assertIsNone(same(()).is_reached)


class ParityOfNumbers(unittest.TestCase):
    def test_the_largest_relative_difference_of_all_steps_counts(self):
        self.assertAlmostEqual(gpu_parity.largest_difference((10.0, 2.2), (10.1, 2.0), 2), 0.1)

    def test_steps_that_are_missing_are_no_agreement(self):
        with self.assertRaisesRegex(RunError, "expected 2 losses"):
            gpu_parity.largest_difference((10.0,), (10.0, 9.0), 2)

    def test_a_loss_that_is_not_a_number_is_no_agreement(self):
        with self.assertRaises(RunError):  # null in a metrics file
            gpu_parity.largest_difference((None,), (1.0,), 1)

    def test_each_figure_is_held_against_the_rounding(self):
        parity = gpu_parity.Parity("gpt2-124m", 50, 2.0**-8, 1e-4, 0.01, None, None)
        self.assertEqual([claim.is_reached for claim in parity.claims()], [True, False, None])


if __name__ == "__main__":
    unittest.main()
