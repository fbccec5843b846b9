"""Reading XLA's schedules for GPUs, on texts as XLA writes them. The compiler itself is not
needed."""

import pytest

from experiments.labs import gpu_schedule

_STAMP = 'custom_call_target="__gpu$xla.gpu.ptx", backend_config={name = "jaxpace_stamp"}'
_LINES = {
    "delay":
    '%ffi_call.1 = (u32[2]{0}, u32[2]{0}) custom-call(%p.0), backend_config={name = '
    '"jaxpace_delay"}',
    "hold":
    '%ffi_call.2 = s32[4]{0} custom-call(%p.1, %g.1), backend_config={name = "jaxpace_hold"}',
    "product": "%gemm_fusion_dot.3 = f32[8,8]{1,0} fusion(%p.1, %p.2), kind=kCustom, calls=%c.3",
    "other": "%loop_add_fusion = f32[8,8]{1,0} fusion(%gemm_fusion_dot.3), kind=kLoop, calls=%c.4",
    "enter": f"%ffi_call.4 = u32[2]{{0}} custom-call(%loop_add_fusion, %g.1), {_STAMP}",
    "start":
    "%all-reduce-start = f32[64]{0} all-reduce-start(%b.1), replica_groups={{0,1}}, to_apply=%add",
    "copy": "%copy.9 = f32[1,24]{1,0} copy(%p.3)",
    "done": "%all-reduce-done = f32[64]{0} all-reduce-done(%all-reduce-start)",
    "exit": f"%ffi_call.5 = u32[2]{{0}} custom-call(%all-reduce-done, %ffi_call.4), {_STAMP}",
    "update": "%wrapped_slice.2 = f32[8]{0} fusion(%all-reduce-done), kind=kLoop, calls=%c.7",
    "end": f"%ffi_call.6 = u32[2]{{0}} custom-call(%wrapped_slice.2, %ffi_call.5), {_STAMP}",
}
_ORDER = list(_LINES)


def text(*names, more=()):
  lines = ["  %p.0 = f32[] parameter(0)", *("  " + _LINES[name] for name in names), *more,
           "  %b.9 = f32[8]{0} bitcast(%copy.9)", "  ROOT %tuple = (f32[8]{0}) tuple(%b.9)"]
  return ("HloModule jit_step, is_scheduled=true\n\n%c.3 (a: f32[8]) -> f32[8] {\n  ROOT %x = "
          "f32[8]{0} copy(%a)\n}\n\n"
          "ENTRY %main (p.0: f32[]) -> (f32[8]) {\n" + "\n".join(lines) + "\n}\n")


def test_a_schedule_is_read_in_order():
  found = gpu_schedule.schedule(text(*_ORDER))
  assert [operation.kind for operation in found.operations] == [
      "delay", "hold", "product", "other", "stamp", "start", "copy", "done", "stamp", "copy",
      "stamp"]
  assert found.count("stamp", "delay") == 4 and found.count("copy") == 2
  assert (found.branches, found.host, found.reduced) == (0, 0, 64)
  assert found.problems(delayed=True) == [] and found.starts() == [1.0]


@pytest.mark.parametrize("line", [
    "  %c = f32[] conditional(%p.0, %a, %b), branch_computations={%t, %f}",
    "  %w = (s32[]) while(%t), body=%b"])
def test_branches_are_counted(line):
  assert gpu_schedule.schedule(text(*_ORDER, more=[line])).branches == 1


@pytest.mark.parametrize("line", [
    '  %x = u32[2]{0} custom-call(%a), custom_call_target="xla_ffi_python_gpu_callback"',
    "  %o = token[] outfeed(%a)",
    '  %m = f32[8]{0} custom-call(%a), custom_call_target="MoveToHost"'])
def test_what_goes_to_the_host_is_counted(line):
  assert gpu_schedule.schedule(text(*_ORDER, more=[line])).host == 1


def without(*names):
  return [name for name in _ORDER if name not in names]


def moved(name, before):
  order = without(name)
  order.insert(order.index(before), name)
  return order


@pytest.mark.parametrize("order, says", [
    (moved("delay", "other"), "before the first stamp"),
    (without("delay"), "the delay is not the first timer"),
    (moved("enter", "copy"), "no stamp between the last matrix product and the start"),
    (moved("enter", "product"), "no stamp between the last matrix product and the start"),
    (moved("exit", "done"), "no stamp after the last collective"),
    (without("exit"), "no stamp after the last collective"),
    (without("product"), "no matrix products"),
])
def test_what_is_out_of_order_is_told(order, says):
  assert says in "; ".join(gpu_schedule.schedule(text(*order)).problems(delayed=True))


def test_a_collective_that_starts_early_is_seen():
  order = [*_ORDER[:3], "start", "product", *without("start")[3:]]
  assert gpu_schedule.schedule(text(*order)).starts() == [0.5]


def test_thunks_are_counted_by_what_launches_them(tmp_path):
  assert gpu_schedule.thunks(tmp_path, "jit_step") is None
  (tmp_path / "module_0001.jit_step.thunk_sequence_after_thunk_passes.txt").write_text(
      "000: kCommandBuffer [source | next=005 (1)] \n"
      "    001: kCustomKernel [source | sink] gemm grid: [1, 1, 1]\n"
      "    002: kCopy         [prev=001 | sink] kCopy\n"
      "005: kAsyncStart   [prev=000 | next=000] stream=communication_stream[0]\n"
      "    004: kAllReduce [source | sink] kAllReduce\n"
      "000: kCommandBuffer [prev=000 | sink] \n"
      "    006: kCustomKernel [source | sink] jaxpace_stamp\n"
      "009: kAsyncDone    [source | sink] async_id=5\n")
  found = gpu_schedule.thunks(tmp_path, "jit_step")
  assert (found.graphs, found.inside) == (2, 3)
  assert found.outside == ["kAsyncStart", "kAllReduce", "kAsyncDone"]


def program(name, body):
  return (f"HloModule m\n\n%{name} (param_0.{len(name)}: f32[8], param_1: f32[8]) -> f32[8] {{\n"
          f"  %param_0.{len(name)} = f32[8]{{0}} parameter(0), "
          f"metadata={{scheduling_name=\"{name}\"}}\n"
          f"  %param_1 = f32[8]{{0}} parameter(1)\n  ROOT %{name}.7 = f32[8]{{0}} {body}\n}}\n\n"
          f"ENTRY %main (a: f32[8]) -> f32[8] {{\n"
          f"  ROOT %f.{name} = f32[8]{{0}} fusion(%a, %a), kind=kLoop, calls=%{name}, "
          f"metadata={{op_name=\"{name}\"}}\n}}\n")


def test_kernels_are_told_apart_by_what_they_compute_not_by_their_names():
  first = program("fused_add", "add(%param_0.9, %param_1), metadata={op_name=\"x\"}")
  same = program("fused_add.clone", "add(%param_0.15, %param_1)")
  assert (gpu_schedule.kernels(first) == gpu_schedule.kernels(same)
          and gpu_schedule.changed(first, same) == 0)
  other = program("fused_add", "multiply(%param_0.9, %param_1)")
  swapped = program("fused_add", "add(%param_1, %param_0.9)")
  assert gpu_schedule.changed(first, other) == gpu_schedule.changed(first, swapped) == 1
  cut = program("cut", "concatenate(%param_0.3, %param_1), dimensions={0}")
  assert gpu_schedule.changed(cut, other) == 0, "only joins what is there"


def test_command_buffers_within_a_loop_hold_what_is_further_in():
  found = gpu_schedule.sequence("""\
001: kWhile         [prev=000 (1) | next=022 (1)]
condition:
    002: kCustomKernel [source | sink] compare grid: [1, 1, 1]
  body:
    003: kAllGather          [prev=034 (1) | next=000 (1)] kAllGather
    000: kCommandBuffer      [prev=035 (1) | next=042 (1)]
        004: kCustomKernel [source       | next=037 (1)] jaxpace_mark_5 grid: [1, 1, 1]
        005: kCustomKernel [prev=036 (1) | sink        ] gemm grid: [1, 1, 1]
    007: kAsyncStart         [prev=000 (1) | next=046 (4)] stream=communication_stream[0], async_id=42
        006: kReduceScatter [source | sink] kReduceScatter
    008: kCustomKernel       [prev=042 (4) | sink] jaxpace_mark_7 grid: [1, 1, 1]
""")  # noqa: E501
  assert ([thunk.in_graph for thunk in found] == [False, False, False, False, True, True, False,
                                                  False, False])
