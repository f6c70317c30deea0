"""Settings of all tests: no deadline of Hypothesis, no database left behind; which are quick, long, or left out."""

import gc
import shutil
from collections import Counter
from itertools import chain, groupby
from pathlib import Path
from zlib import crc32

import matplotlib
import pytest
from hypothesis import settings

matplotlib.use("Agg")
settings.register_profile("tiersim", deadline=None, database=None, derandomize=True)
settings.load_profile("tiersim")

TESTS = Path(__file__).parent
QUICK = {
    "sim": ("test_units.py", "test_public_api.py", "test_quick.py"),
    "sim.advice": (
        "test_advice.py::test_equal_speeds",
        "test_advice.py::test_the_reason",
        "test_advice.py::test_the_state",
    ),
    "sim.analysis": (
        "analysis/test_time.py",
        "analysis/test_figures.py",
        "analysis/test_recipe.py",
    ),
    "sim.applying": ("applying/test_export.py",),
    "sim.commands": ("test_options.py",),
    "sim.conformance": ("conformance/test_checker.py", "policies/test_law_in_brief.py"),
    "sim.engine": ("engine/test_timeline.py",),
    "sim.eviction": ("policies/test_law_in_brief.py",),
    "sim.explanation": ("test_explanation.py",),
    "sim.hardware": ("hardware/test_platform.py", "hardware/test_profile.py"),
    "sim.measure": ("measure/test_fit.py",),
    "sim.policies": (
        "policies/recompute/test_chen.py",
        "policies/offload/test_swap_all.py",
        "policies/test_recipe.py",
    ),
    "sim.report": ("report/test_table.py", "report/test_files.py"),
    "sim.rewrites": ("rewrites/test_fuse.py",),
    "sim.scaffold": (
        "test_scaffold.py::test_a_name",
        "test_scaffold.py::test_an_unknown",
        "test_scaffold.py::test_an_evictor",
        "test_scaffold.py::test_a_file",
    ),
    "sim.solvers": ("solvers/test_unnecessary.py",),
    "sim.sweeps": ("sweep/test_study.py",),
    "sim.trace": ("trace/test_graph.py", "trace/test_io.py"),
    "workloads": ("workloads/test_synthetic.py", "workloads/test_models.py"),
    "workloads.capturing": ("workloads/test_capture_without_torch.py",),
    "workloads.exporters": ("workloads/test_chakra.py",),
    "workloads.importers": ("workloads/test_importers.py",),
}
"""Per package the tests of `pytest -m quick`, by the beginning of their ids: a minute in all on two cores."""

LONG = (
    "rewrites/test_experts_one_after_another.py",
    "rewrites/test_mixtures_of_parts.py",
    "test_layout_search.py::test_what_ranks_can_divide",
    "test_layout_search.py::test_a_device_holds_at_least_its_part_of_the_experts",
    "test_layout_search.py::test_the_layouts_are_those_that_divide",
    "test_layout_search.py::test_schedules_and_context_parallelism_are_tried",
    "test_mt3000_page.py::test_runs_of_the_data",
    "policies/hybrid/test_olla.py::test_another_policy_spills",
    "policies/hybrid/test_hybrid.py::test_a_draft_that_misses_by_little_beside",
    "policies/hybrid/test_hybrid.py::test_it_is_faster_than_each_mechanism_alone",
    "policies/hybrid/test_hybrid.py::test_two_devices_are_planned",
    "policies/hybrid/test_hybrid.py::test_beside_zero_offload",
    "policies/offload/test_patrickstar.py::test_weights_make_way",
    "policies/test_sharing.py::test_a_policy_that_declares_it_falsely",
    "rewrites/test_ring_attention.py::test_any_transformer",
    "rewrites/test_eight_bits_on_many_devices.py::test_a_replica_copies",
    "applying/test_settings.py::test_that_the_run_is_divided",
    "conformance/test_suite.py::test_a_policy_that_ends_the_process_at_a_later",
    "conformance/test_suite.py::test_a_policy_that_ends_the_program",
    "rewrites/test_eight_bits_on_many_devices.py::test_any_layout_computes_the_same",
    "test_advice.py::test_ctrl_c_keeps_what_was_found[json",
    *(
        f"test_advice.py::test_ctrl_c_keeps_what_was_found[text-{words}"
        for words in ("advise --seconds 300 --jobs 1", "smallest", "largest")
    ),
    *(
        f"test_advice.py::test_ctrl_c_keeps_what_was_found[text-advise --seconds 300 --jobs 2 --{option}"
        for option in ("goal", "devices")
    ),
    "test_least_time.py::test_no_policy_beats_the_bound",
    "test_offload_page.py::test_what_was_published_of_zero_offload_is_what_runs_come_to",
    "rewrites/test_context_parallel.py::test_any_mixture_computes_the_same",
    "rewrites/test_equal_dimensions.py",
    "rewrites/test_accumulated_gradients.py",
    "test_regathering.py::test_dividing_weights_too",
    "test_layout.py::test_updates_on_the_host",
    "rewrites/test_loops_and_layouts.py::test_kernels_are_fused",
    "engine/test_copy_path.py::test_an_online_part_is_shown",
    "test_parallel_page.py::test_few_stages_and_microbatches_stand_for_many",
    "test_advice.py::test_everything_that_may_be_combined",
    "test_advice.py::test_the_nearest_change_that_fits",
    "test_advice.py::test_of_a_function_the_search_chooses_the_batch",
    "test_layout_search.py::test_a_search_plans_for_the_filling",
    "test_least_time.py::test_on_a_real_model_the_best_is_so_near",
    "test_advice.py::test_precision_and_optimizer_are_searched",
    "test_advice.py::test_all_policies_are_searched_for_each_precision",
    "test_advice.py::test_in_each_layout_what_plans_at_once_is_run",
    "test_advice.py::test_a_layout_of_several_devices_is_found_together_with_the_policy",
    "test_advice.py::test_a_policy_that_is_told_any_budget_and_plans_the_same_has_the_pace_of_that_plan",
    "test_advice.py::test_nothing_that_splits_no_op_fits_where_one_op_holds_more[torch",
    "test_layout_search.py::test_where_only_the_fastest_is_asked_for_what_cannot_be_it_is_left_out",
    "test_layout_search.py::test_stages_may_have_unequal_numbers_of_layers",
    "test_layout_search.py::test_a_search_finds_what_trying_all_variants_finds",
    "test_layout_search.py::test_a_search_balances_stages_where_that_is_faster",
    "test_layout_search.py::test_estimates_know_what_experts_hold_send_and_update",
    "policies/hybrid/test_several_devices.py::test_where_no_draft_fits_layers_are_recomputed_if_that_does",
    "policies/hybrid/test_random_jobs.py::test_where_no_choice_among_results_of_forward_fits_what_comes_later",
    "test_questions.py::test_one_command_answers",
    "test_site.py::test_all_text_of_the_site",
    "report/test_looks.py::test_all_text_can_be_read",
    "applying/test_export.py::test_the_file_of_a_saved_run_goes_where_it_is_asked_for_and_nowhere_else",
    "applying/test_settings.py::test_each_setting_recomputes_and_moves_where_it_says",
    "applying/test_settings.py::test_every_second_layer_is_a_setting_of_transformers_alone",
    "applying/test_settings.py::test_a_plan_that_moves_weights_is_no_plan_about_activations_alone",
    "applying/test_settings.py::test_an_update_in_backward_is_told_from_one_after_it",
    *(
        f"applying/test_settings.py::test_a_plan_finds_its_setting[{name}"
        for name in ("zero_offload", "layers", "selective", "every_k", "full_recompute-mindspeed")
    ),
    *(
        f"applying/test_torch.py::test_what_the_plan_moves_is_on_the_host_between_forward_and_backward[{name}"
        for name in ("gpt2", "mixer", "residual", "llama")
    ),
    *(
        f"applying/test_torch.py::test_checkpoints_round_layers_hold_what_pytorchs_tracker_shows[{name}"
        for name in ("gpt2", "llama", "vision", "mlp", "deep", "experts", "attention", "dense", "gated")
    ),
    "applying/test_torch.py::test_a_module_runs_as_often_as_checkpoints_are_round_it",
    *(
        f"applying/test_torch.py::test_what_is_recomputed_several_times_is_under_checkpoints_inside_one_another[{name}"
        for name in ("gpt2", "llama", "residual", "deep mlp-revolve-options1")
    ),
    *(
        f"applying/test_torch.py::test_what_was_kept_in_a_layer_is_kept_by_a_selective_checkpoint[{name}"
        for name in ("gpt2-", "llama", "encoder", "attention", "residual")
    ),
    *(
        f"applying/test_torch.py::test_layers_of_one_sweep_are_under_one_checkpoint[{name}"
        for name in ("gpt2", "encoder")
    ),
    *(f"policies/recompute/test_{name}.py" for name in ("checkmate", "megtaichi", "mimose", "moccasin", "moments")),
    *(f"policies/recompute/test_{name}.py" for name in ("relax_and_fix", "rockmate", "tso", "twremat")),
    "policies/test_conformance.py::test_policy_keeps_every_law",
    "policies/test_distinct.py",
    "policies/offload/test_offload_parts.py",
    "policies/offload/test_autotm.py::test_on_optane",
    "policies/composition/test_composition.py::test_compositions_keep_every_law",
    "policies/composition/test_composition.py::test_a_single_part_gives",
    "policies/hybrid/test_delta.py::test_no_run_beats",
    "policies/hybrid/test_hybrid.py::test_no_whole_choice",
    "policies/hybrid/test_hybrid.py::test_where_the_host_is_too_small",
    "policies/hybrid/test_hybrid.py::test_where_the_update_does_not_fit",
    "policies/hybrid/test_hybrid.py::test_where_state_and_gradients_leave",
    "policies/hybrid/test_hybrid.py::test_where_another_part_keeps",
    "policies/hybrid/test_joint_optimal.py::test_no_plan",
    "policies/hybrid/test_olla.py::test_a_real_step",
    "policies/hybrid/test_poet.py::test_no_plan_of_its_class",
    "policies/offload/test_g10.py::test_bert_beyond_the_memory_of_its_machine[4 GiB]",
    "solvers/test_ordering.py",
    "solvers/test_rounding.py",
    "conformance/test_isolation.py",
    "conformance/test_planted_policies.py::test_a_planted_fault",
    "fuzz/test_fuzz.py::test_more",
    "test_documents.py::test_a_notebook_runs",
    "test_documents.py::test_the_demos_table",
    "test_scaffold.py::test_a_new_policy",
    "test_scaffold.py::test_what_is_written_in_the_tree",
    "test_site.py::test_what_a_guide_tells_to_type_works",
    "workloads/test_adapters.py",
    "workloads/test_import_fuzz.py",
    "policies/test_conformance.py::test_another_process",
    "test_validation_page.py::test_printed_figures_are",
    "test_validation_page.py::test_later_cases_are",
    "sweep/test_kill.py::test_killing_a_worker_and_the_driver",
    "test_advice.py::test_a_policy_whose_work_takes",
    "test_advice.py::test_where_nothing_fits",
    "analysis/test_bounds.py::test_no_legal_plan_fits",
    "policies/composition/test_composition.py::test_two_mechanisms_fit",
    "policies/composition/test_named_everywhere.py",
    "policies/composition/test_composition.py::test_a_planner_fills",
    "policies/hybrid/test_capuchin.py::test_guided_iterations_are",
    "policies/hybrid/test_olla.py::test_spilling_and",
    "engine/test_fairness.py::test_where_a_flow",
    "solvers/test_unnecessary.py::test_never_slower",
)
"""Tests that a plain `pytest` leaves to `.ci/run`: with them it takes twice as long."""

ONE_IN = {
    "applying/test_settings.py::test_that_the_run_is_divided_over_devices_is_no_option_and_is_said": 3,
    "engine/test_copy_path.py::test_a_planned_run_with_copies_has_one_log_on_either_path": 2,
    "engine/test_fast_path.py::test_sums_in_place_and_collectives_write_the_log_of_the_general_path": 3,
    "engine/test_instant.py::test_nothing_unrelated_at_any_nanosecond_changes_a_small_run": 3,
    "policies/hybrid/test_hybrid.py::test_no_whole_choice": 3,
    "policies/hybrid/test_hybrid.py::test_on_small_nets_it_is_never_slower_than_the_mechanisms_that_it_joins": 3,
    "policies/offload/test_patrickstar.py::test_weights_make_way_for_their_gradients": 3,
    "policies/recompute/test_dtr_simrd.py": 2,
    "policies/test_distinct.py::test_two_policies_differ_somewhere": 3,
    "policies/test_sharing.py::test_a_policy_that_declares_it_falsely_breaks_law_7": 2,
    "policies/test_sharing.py::test_what_planners_find_once_for_a_structure_is_what_each_size_would_find": 2,
    "report/test_plot.py::test_any_name_leaves_space_for_the_figure_and_no_warning": 3,
    "report/test_plot.py::test_no_label_lies_on_a_line_a_marker_or_a_label": 3,
    "rewrites/test_adapters_on_many_devices.py": 2,
    "rewrites/test_captured_in_stages.py": 2,
    "rewrites/test_chunks.py::test_each_part_computes_its_part": 3,
    "rewrites/test_chunks.py::test_so_it_does_where_ranks_divide_tokens_or_the_vocabulary": 3,
    "rewrites/test_chunks.py::test_they_take_what_microbatches_built_one_by_one_take": 2,
    "rewrites/test_context_parallel.py": 2,
    "rewrites/test_equal_dimensions.py": 3,
    "rewrites/test_expert_parallel.py": 2,
    "rewrites/test_experts_one_after_another.py": 2,
    "rewrites/test_mixtures_of_parts.py": 2,
    "rewrites/test_own_statistics.py": 2,
    "rewrites/test_replicas.py": 2,
    "rewrites/test_resized.py::test_a_plan_on_a_rewritten_trace_is_what_it_would_be_alone": 3,
    "rewrites/test_ring_attention.py": 2,
    "rewrites/test_series.py::test_in_layouts": 2,
    "rewrites/test_stages_of_their_own.py": 2,
    "rewrites/test_tied_weights.py": 2,
    "test_advice.py::test_bounds_leave_out_nothing_that_is_faster": 3,
    "test_layout.py::test_balance_is_of_what_a_device_holds_where_it_holds_several_parts": 3,
    "test_layout.py::test_windows_of_128_k_and_a_million_tokens_fit_where_they_are_divided": 3,
    "test_mt3000_page.py::test_runs_of_the_data_are_what_the_program_finds": 3,
    "test_regathering.py": 3,
}
"""Of the examples of these tests a plain `pytest` runs one in so many, and each value that examples share; the others
are long. Of a grid, where each value of an example stands in others, too, they are spare, and left out by `.ci/run`."""

PASSED = "tiersim/passed"
"""Where pytest's cache has the ids of what passed in the last run that was no `--rest`."""


def pytest_addoption(parser):
    parser.addoption(
        "--rest",
        action="store_true",
        help="only what did not pass in the last run in this folder: skipped for want of an extra, or left out",
    )


class Passed:
    """Keeps the ids of the tests that pass; where several processes share a run, the first one hears of all of them."""

    def __init__(self):
        self.ids = set()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.ids.add(report.nodeid)
        elif report.failed:  # in a teardown
            self.ids.discard(report.nodeid)

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "cache"):  # there is none with -p no:cacheprovider
            session.config.cache.set(PASSED, sorted(self.ids))


def pytest_configure(config):
    if not config.option.rest and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed())


def pytest_ignore_collect(collection_path, config):
    """For the quick tests alone, or those of speed, only their files are read."""
    asked = config.option.markexpr
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    if asked == "quick":
        read = collection_path in {TESTS / test.partition("::")[0] for tests in QUICK.values() for test in tests}
    else:
        read = not asked.startswith("alone") or "mark.alone" in collection_path.read_text(encoding="utf-8")
    return None if read else True


def pytest_collection_modifyitems(config, items):
    """The one place where a test becomes quick, long or spare, or is left out because it passed before (`--rest`)."""
    if config.option.rest and not hasattr(config, "cache"):
        raise pytest.UsageError("--rest needs the cache of what has passed: leave out -p no:cacheprovider")
    quick = tuple(test for tests in QUICK.values() for test in tests)
    for path, tests in groupby(items, key=lambda item: item.path):
        if not path.is_relative_to(TESTS):
            continue
        file = path.relative_to(TESTS).as_posix()
        marks = [  # of all the names, those that may be of this file
            (mark, tuple(each for each in names if each.startswith(file) or file.startswith(each)))
            for mark, names in ((pytest.mark.quick, quick), (pytest.mark.long, LONG))
        ]
        examples = {}
        for item in tests:
            name = f"{file}::{item.nodeid.partition('::')[2]}"
            for mark, names in marks:
                if name.startswith(names):
                    item.add_marker(mark)
            if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
                examples.setdefault(name.partition("[")[0], []).append(item)
        for test, family in examples.items():
            step = next((step for name, step in ONE_IN.items() if test.startswith(name)), 1)
            for item, is_spare in left_out(family, step):
                item.add_marker(pytest.mark.long)
                if is_spare:
                    item.add_marker(pytest.mark.spare)
    if config.option.rest:  # last, so that what passed before decides about no other
        passed = set(config.cache.get(PASSED, []))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]


def left_out(items, step):
    """All examples of a test but one in so many, by name, and the first with each value that several share; with each,
    whether several share all its values.

    A stride would go along with the parameters.
    """
    values = [{(key, id(value)) for key, value in item.callspec.params.items()} for item in items]
    shared = {value for value, count in Counter(chain.from_iterable(values)).items() if count > 1}
    left, shown = [], set()
    for item, own in zip(items, values, strict=True):
        if item is not items[0] and own & shared <= shown and crc32(item.name.encode()) % step:
            left.append((item, own <= shared))
        else:
            shown |= own
    return left


def pytest_collection_finish():
    """All that has been collected stays until the end: the garbage collector need not go through it each time."""
    gc.freeze()


@pytest.fixture(scope="module")
def browser():
    """Chromium by Playwright; skips the test where either is missing."""
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("no browser: `chromium` is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser driver: `playwright` is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()
