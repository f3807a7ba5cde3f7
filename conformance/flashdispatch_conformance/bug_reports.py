"""Public bug reports about attention kernels and dispatchers, and what of this project keeps each from coming back.

The numbers are those of the collection that they were taken from, with gaps; none is ever dropped. What each was is
said in our own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BugReport:
    """One public report, and exactly one of: cases that state it, checks or tests that do, a reason for none yet."""

    id: str
    report: str
    """``"owner/repository#number"``."""
    said: str
    """What was wrong, in one line."""
    cases: tuple[str, ...] = ()
    """Ids of cases."""
    checks: tuple[str, ...] = ()
    """Ids of other checks of the suite, or ``"tests/<file>::<function>"`` of this repository."""
    not_yet: str = ""
    """Why nothing states it: what the API can't express."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.cases, self.checks, self.not_yet))) != 1:
            raise ValueError(f"{self.id} needs exactly one of cases, checks and not_yet")


_PAGED = "keys in pages (attention_kvcache with a block table) are no part of the API yet"
_CUPY = "no backend hands tensors over by DLPack yet"

_BAD_INPUT = "tests/flashdispatch/test_bad_input.py::"
_FORCING = "tests/flashdispatch/test_forcing.py::"
_SUPPORT = "tests/registry/test_support.py::"
_PLANS = "tests/flashdispatch/test_plans.py::"

BUG_REPORTS: tuple[BugReport, ...] = (
    # Tail tiles
    BugReport(
        "B01",
        "pytorch/pytorch#196678",
        "dQ is NaN when S % 128 = 64 and every score is near -120",
        cases=("named/length_704_minus_120",),
    ),
    BugReport(
        "B02",
        "NVIDIA/cudnn-frontend#1072",
        "dK and dV are NaN for one query with scores near -122",
        cases=("named/decode_minus_120",),
    ),
    BugReport(
        "B04",
        "jax-ml/jax#27224",
        "right only for lengths that are multiples of the block",
        cases=("pinned/B04", "named/length_192_d16"),
    ),
    BugReport(
        "B05",
        "flashinfer-ai/flashinfer#5090",
        "keys past the end are zeros with weight exp(0)",
        cases=("pinned/B05", "named/keys_200_minus_120"),
    ),
    BugReport(
        "B07",
        "meta-pytorch/attention-gym#50",
        "of 137 rows the last 9 differ",
        cases=("named/length_137",),
    ),
    BugReport(
        "B08",
        "tile-ai/tilelang#290",
        "the tail mask hides wrong keys when shapes are dynamic",
        cases=("pinned/B08", "named/decode_lens_gqa"),
    ),
    BugReport(
        "B10",
        "66RING/tiny-flash-attention#12",
        "wrong when D or S is no power of two",
        cases=("pinned/B10", "pinned/B10_causal", "named/d63"),
    ),
    # Masks
    BugReport(
        "B11",
        "pytorch/pytorch#103082",
        "a causal decode row keeps key 0 alone",
        cases=("pinned/B11_decode", "pinned/B11_decode_top_left", "pinned/B11_wide", "pinned/B11_tall"),
    ),
    BugReport(
        "B13",
        "ml-explore/mlx#2835",
        "two libraries align a causal mask differently when Sq and Sk differ",
        cases=("pinned/B13", "pinned/B13_top_left"),
    ),
    BugReport(
        "B14",
        "Dao-AILab/flash-attention#1778",
        "half of the rows are 0 with Sq > Sk: right, and asked about",
        cases=("pinned/B14", "named/causal_tall"),
    ),
    BugReport(
        "B16",
        "vllm-project/vllm#3385",
        "a window of 2048 is 2048 keys in one library and 2049 in another",
        cases=("pinned/B16", "named/window_64"),
    ),
    BugReport(
        "B17",
        "sgl-project/sglang#32087",
        "decode drops the oldest key inside the window",
        cases=("pinned/B17", "named/decode_window"),
    ),
    BugReport(
        "B19",
        "NVIDIA/TransformerEngine#1197",
        "one of three backends is off with a window and scale 1",
        cases=("pinned/B19", "named/scale_one"),
    ),
    BugReport(
        "B20",
        "triton-lang/triton#4541",
        "the backward ignores that a call is not causal",
        cases=("pinned/B20", "pinned/B20_causal"),
    ),
    BugReport(
        "B22",
        "pytorch/pytorch#163588",
        "3.4 % off when a mask hides 42 % of the keys",
        cases=("pinned/B22", "named/mask_bool_keys"),
    ),
    BugReport(
        "B23",
        "vllm-project/vllm#30887",
        "values left of the window are loaded, and NaN among them comes out",
        not_yet="only attention_kvcache will let keys left of every window be anything; elsewhere they must be finite",
    ),
    BugReport(
        "B25",
        "onnx/onnx#8068",
        "the causal frontier ignores the valid length; NaN for a row that a mask hides",
        cases=("pinned/B25", "named/mask_bool_2d_causal"),
    ),
    BugReport(
        "B26",
        "thu-ml/SageAttention#372",
        "decode sees kv <= q, and large scores are NaN",
        cases=("pinned/B26", "pinned/B26_decode", "pinned/B26_huge"),
    ),
    # NaN
    BugReport(
        "B28",
        "pytorch/pytorch#103963",
        "rows that see nothing are NaN",
        cases=("pinned/B28", "named/mask_bool_empty_rows"),
    ),
    BugReport(
        "B29",
        "pytorch/pytorch#103749",
        "a last query without a key is NaN",
        cases=("pinned/B29",),
    ),
    BugReport(
        "B31",
        "pytorch/pytorch#127055",
        "NaN when the first key tiles of a row are hidden",
        cases=("pinned/B31", "named/mask_float_band"),
    ),
    BugReport(
        "B32",
        "pytorch/pytorch#125674",
        "the backward is NaN when all keys are equal and large",
        cases=("pinned/B32", "named/all_equal"),
    ),
    BugReport(
        "B34",
        "Dao-AILab/flash-attention#1745",
        "NaN in the padding of the key cache reaches the output",
        cases=("pinned/B34", "named/lens_kv_only"),
    ),
    BugReport(
        "B35",
        "NVIDIA/cudnn-frontend#160",
        "the backward is NaN in training",
        cases=("pinned/B35_square", "pinned/B35_wide", "pinned/B35_lens"),
    ),
    # Overflow
    BugReport("B37", "Dao-AILab/flash-attention#2214", "32-bit addresses overflow forward", cases=("pinned/B37",)),
    BugReport(
        "B38",
        "Dao-AILab/flash-attention#2260",
        "a product overflows before it is made 64-bit, in the backward",
        cases=("pinned/B38",),
    ),
    BugReport(
        "B40",
        "Dao-AILab/flash-attention#2611",
        "gradients are wrong when the rows of dout lie far apart",
        cases=("pinned/B40", "named/view_sliced"),
    ),
    BugReport(
        "B41",
        "Dao-AILab/flash-attention#1311",
        "the backward reads illegal addresses at a large batch",
        cases=("pinned/B41",),
    ),
    BugReport(
        "B43",
        "facebookresearch/xformers#845",
        "a batch of 65536 ends in a raw CUDA error",
        cases=("pinned/B43",),
    ),
    BugReport(
        "B44",
        "Dao-AILab/flash-attention#1786",
        "80,000 sequences can't be launched",
        cases=("pinned/B44",),
    ),
    BugReport(
        "B46",
        "facebookresearch/xformers#719",
        "NaN for more than 32768 keys: a counter of 16 bits",
        cases=("pinned/B46", "pinned/B46_ones"),
    ),
    BugReport(
        "B47",
        "pytorch/pytorch#162362",
        "rows past 45000 are wrong: offsets into the mask overflow",
        cases=("pinned/B47",),
    ),
    # Strides
    BugReport("B49", "pytorch/pytorch#181133", "permuted inputs are wrong at a tiny size", cases=("pinned/B49",)),
    BugReport(
        "B50",
        "pytorch/pytorch#112577",
        "garbage for inputs that are not contiguous",
        cases=("pinned/B50", "named/view_transposed"),
    ),
    BugReport(
        "B52",
        "Dao-AILab/flash-attention#355",
        "dQ is wrong for a dout that is not contiguous",
        cases=("pinned/B52", "pinned/B52_every_other", "pinned/B52_sum"),
    ),
    BugReport(
        "B53",
        "pytorch/pytorch#187506",
        "wrong when the innermost dim is not contiguous",
        cases=("pinned/B53", "named/view_last_dim_strided"),
    ),
    BugReport(
        "B55",
        "pytorch/pytorch#133671",
        "two backends got two different dout, drawn in the memory order of their outputs",
        checks=("tests/conformance/test_inputs.py::test_numbers_depend_on_the_case_and_the_seed_alone",),
    ),
    BugReport(
        "B56",
        "facebookresearch/xformers#813",
        "a bias with rows of 43 keys is refused, and its padded form too",
        cases=("pinned/B56", "pinned/B56_slice"),
    ),
    BugReport(
        "B58",
        "pytorch/pytorch#153903",
        "the output's strides depend on the backend",
        cases=("pinned/B58", "named/bhsd"),
    ),
    # Dtypes
    BugReport(
        "B59",
        "jax-ml/jax#32242",
        "the gradient of a float32 bias is not finite with 16-bit inputs",
        cases=("pinned/B59", "named/mask_float32_shared_grad"),
    ),
    BugReport("B61", "cupy/cupy#8801", "taking a bfloat16 tensor by DLPack crashes the process", not_yet=_CUPY),
    BugReport(
        "B62",
        "pytorch/pytorch#105202",
        "a negative scale gives NaN",
        cases=("pinned/B62", "pinned/B62_zero"),
    ),
    BugReport(
        "B64",
        "Dao-AILab/flash-attention#1214",
        "a part of some heads is not written at D = 192",
        cases=("pinned/B64",),
    ),
    BugReport(
        "B65",
        "vllm-project/vllm#34570",
        "a loop runs 0 times at D = 32 and the output stays as it was",
        cases=("pinned/B65", "pinned/B65_window"),
    ),
    # Backward
    BugReport(
        "B67",
        "Dao-AILab/flash-attention#2552",
        "dV is wrong when Dv / 2 is no multiple of 32",
        cases=("pinned/B67_dv40", "pinned/B67_dv72", "pinned/B67_dv96", "pinned/B67_dv104"),
    ),
    BugReport(
        "B68",
        "NVIDIA/TransformerEngine#3216",
        "dQ is five times too large at D = 256 with inputs like activations",
        cases=("pinned/B68", "named/d256_outliers"),
    ),
    BugReport(
        "B70",
        "Dao-AILab/flash-attention#2466",
        "the backward with a softcap never ends",
        cases=("pinned/B70", "named/softcap_peaked"),
    ),
    BugReport(
        "B71",
        "Dao-AILab/flash-attention#2544",
        "dQ is wrong with softcap and lengths, which was not refused",
        cases=("pinned/B71", "named/softcap_lens"),
    ),
    BugReport(
        "B73",
        "NVIDIA/TransformerEngine#3249",
        "the gradient of sinks reads the LSE of packed sequences as if padded",
        cases=("pinned/B73", "named/sinks_empty_rows"),
    ),
    BugReport(
        "B74",
        "pytorch/pytorch#158212",
        "gradients of K and V are wrong under a mask with many empty blocks",
        cases=("pinned/B74", "pinned/B74_small"),
    ),
    # Lengths
    BugReport(
        "B76",
        "Dao-AILab/flash-attention#1537",
        "an empty sequence fails when no other has more than one query",
        cases=("pinned/B76",),
    ),
    BugReport(
        "B77",
        "Dao-AILab/flash-attention#1619",
        "fewer tokens than sequences fail with grouped heads",
        cases=("pinned/B77",),
    ),
    BugReport(
        "B79",
        "Dao-AILab/flash-attention#1713",
        "is a sequence with keys and no query defined?",
        cases=("pinned/B79",),
    ),
    BugReport(
        "B80",
        "pytorch/pytorch#176793",
        "tokens that belong to no sequence get NaN gradients",
        cases=("pinned/B80",),
    ),
    BugReport(
        "B82",
        "NVIDIA/TransformerEngine#2186",
        "dK and dV are abnormally large where padding is long",
        cases=("pinned/B82", "named/lens_window_gqa_mask"),
    ),
    BugReport(
        "B83",
        "flashinfer-ai/flashinfer#3047",
        "queries without keys spoil the merged result",
        cases=("pinned/B83", "named/no_keys"),
    ),
    BugReport(
        "B85",
        "pytorch/pytorch#81077",
        "sequences of length 0 make the batch NaN",
        cases=("pinned/B85", "named/lens_causal"),
    ),
    # Grouped query heads
    BugReport(
        "B86",
        "ModelTC/LightX2V#1472",
        "a fallback does not know of grouped heads",
        cases=("pinned/B86", "named/gqa_8_2"),
    ),
    BugReport(
        "B88",
        "pytorch/pytorch#191085",
        "one KV head takes the slow path without a word",
        cases=("pinned/B88", "named/mqa_4_1"),
    ),
    BugReport(
        "B89",
        "ROCm/rocm-libraries#5888",
        "different numbers of heads of K and V are refused",
        checks=(f"{_BAD_INPUT}test_bad_argument_raises_its_builtin_and_ours",),
    ),
    # LSE
    BugReport(
        "B91",
        "sgl-project/sglang#35045",
        "an LSE of base 2 is merged as if natural",
        cases=("pinned/B91",),
    ),
    BugReport(
        "B92",
        "flashinfer-ai/flashinfer#50",
        "split keys are merged wrongly unless the LSE is asked for",
        cases=("pinned/B92",),
    ),
    BugReport(
        "B94",
        "meta-pytorch/attention-gym#205",
        "two backends of one API return the LSE in two conventions",
        checks=("property/m03_split_keys", "tests/test_contract.py::test_natural_log_float32_bhs_before_dropout"),
    ),
    # Paged keys
    BugReport("B95", "Dao-AILab/flash-attention#2709", "a block table is read past its end", not_yet=_PAGED),
    BugReport("B97", "sgl-project/sglang#32902", "a token's index is used as a page's", not_yet=_PAGED),
    # Determinism
    BugReport(
        "B98",
        "Dao-AILab/flash-attention#359",
        "a race in the backward shows at a batch of 300",
        cases=("pinned/B98", "named/deterministic"),
    ),
    BugReport(
        "B100",
        "Dao-AILab/flash-attention#429",
        "the backward with a bias differs from run to run",
        cases=("pinned/B100",),
    ),
    BugReport(
        "B101",
        "flashinfer-ai/flashinfer#1046",
        "NaN, depending on what ran before",
        checks=("condition/determinism_under_load",),
    ),
    BugReport(
        "B103",
        "tile-ai/tilelang-ascend#949",
        "0.3 % of the elements are wrong, at a large batch only",
        cases=("pinned/B103", "named/batch_60"),
    ),
    BugReport(
        "B104",
        "triton-lang/triton#10590",
        "a chained product differs from call to call in some configurations",
        checks=("condition/determinism_under_load",),
    ),
    BugReport(
        "B106",
        "flashinfer-ai/flashinfer#2424",
        "a sequence's result depends on its batch: the tile is chosen by the others",
        checks=("property/m11_batch_mates",),
    ),
    # Compile
    BugReport(
        "B107",
        "pytorch/pytorch#174049",
        "a compiled call loses its scale",
        cases=("pinned/B107",),
    ),
    BugReport(
        "B109",
        "pytorch/pytorch#139424",
        "an expanded bias arrives with stride 0 and is refused",
        cases=("pinned/B109", "named/mask_float_expanded"),
    ),
    BugReport(
        "B110",
        "pytorch/pytorch#136232",
        "the backward is NaN when the loss uses the LSE",
        cases=("pinned/B110", "named/lse_gradient"),
    ),
    BugReport(
        "B112",
        "SandAI-org/MagiAttention#137",
        "a compiled backward trips over its strides when S is no multiple of 128",
        cases=("pinned/B112_196", "pinned/B112_257"),
    ),
    BugReport(
        "B113",
        "pytorch/pytorch#180445",
        "a traced backward has other strides than a real one at a batch of 65536",
        cases=("pinned/B113",),
    ),
    # Graphs, streams, devices
    BugReport(
        "B115",
        "thu-ml/SageAttention#392",
        "a graph replayed with new values gives old results",
        checks=("condition/graph_new_values",),
    ),
    BugReport(
        "B116",
        "thu-ml/SageAttention#371",
        "kernels on the legacy stream escape the capture",
        checks=("condition/graph_new_values", "condition/stream"),
    ),
    BugReport(
        "B118",
        "Dao-AILab/flash-attention#1782",
        "the kernel runs on device 0 for tensors on device 1",
        checks=("condition/second_device",),
    ),
    BugReport(
        "B119",
        "flashinfer-ai/flashinfer#452",
        "illegal access for tensors on device 1",
        checks=("condition/second_device",),
    ),
    BugReport("B121", "linkedin/Liger-Kernel#1331", "DLPack export fails off the current device", not_yet=_CUPY),
    # Import
    BugReport(
        "B122",
        "facebookresearch/xformers#1030",
        "importing starts a CUDA context, and forked workers die",
        checks=(
            "condition/no_context_at_import",
            "tests/test_no_hard_dependencies.py::test_a_process_forked_after_discovery_computes_the_same",
        ),
    ),
    BugReport(
        "B124",
        "NVIDIA/TransformerEngine#872",
        "importing starts a CUDA context, through torch.compile",
        checks=("condition/no_context_at_import",),
    ),
    BugReport(
        "B125",
        "Dao-AILab/flash-attention#1644",
        "an extension for another torch does not import, and its error is lost",
        checks=("tests/registry/test_plugins.py::test_a_plugin_that_raises_at_import_is_recorded_and_harms_nobody",),
    ),
    BugReport(
        "B127",
        "Dao-AILab/flash-attention#990",
        "said to be not installed, when no GPU is visible",
        checks=(
            f"{_SUPPORT}test_an_undeclared_feature_is_refused_by_its_code",
            "tests/cli/test_doctor.py::test_a_machine_without_a_gpu_is_a_cpu_and_starts_no_cuda",
        ),
    ),
    # Choice
    BugReport(
        "B128",
        "huggingface/diffusers#12605",
        "a mask is dropped for backends without that argument",
        cases=("pinned/B128", "named/mask_bool_all_false"),
    ),
    BugReport(
        "B130",
        "huggingface/transformers#41010",
        "a backend asked for by name is silently replaced",
        checks=(f"{_FORCING}test_unknown_name_says_what_is_registered_and_nearest",),
    ),
    BugReport(
        "B131",
        "hao-ai-lab/FastVideo#1254",
        "the log says that no backend was selected, and one is used",
        checks=(f"{_FORCING}test_what_was_overridden_is_in_the_plan_and_logged_once",),
    ),
    BugReport(
        "B133",
        "facebookresearch/xformers#408",
        "training is given a kernel whose backward can't run",
        checks=(f"{_SUPPORT}test_a_backward_that_takes_smaller_heads_refuses_only_gradients_and_names_each_size",),
    ),
    BugReport(
        "B134",
        "Dao-AILab/flash-attention#2750",
        "a raw error for want of shared memory at D = 256",
        cases=("pinned/B134",),
    ),
    # Messages
    BugReport(
        "B136",
        "pytorch/pytorch#141218",
        "the process dies for tensors of rank 9 with empty dims",
        checks=(f"{_BAD_INPUT}test_bad_argument_raises_its_builtin_and_ours",),
    ),
    BugReport(
        "B137",
        "pytorch/pytorch#174950",
        "empty tensors crash",
        checks=(
            f"{_BAD_INPUT}test_bad_argument_raises_its_builtin_and_ours",
            "tests/test_contract.py::test_empty_tensors_run",
        ),
    ),
    BugReport(
        "B139",
        "pytorch/pytorch#117354",
        "no kernel for 3-D inputs, and the reason is only in warnings",
        checks=(f"{_BAD_INPUT}test_bad_argument_raises_its_builtin_and_ours",),
    ),
    BugReport(
        "B140",
        "vllm-project/vllm#18764",
        "a default is reported as an unsupported backend called None",
        checks=(f"{_FORCING}test_auto_takes_the_highest_priority",),
    ),
    # Memory
    BugReport(
        "B142",
        "intel/torch-xpu-ops#2390",
        "a bool mask takes 1.66 GB where 0.25 are needed",
        checks=(
            "tests/benchmarks/test_memory.py::test_extra_memory_on_a_gpu_grows_no_faster_than_the_sequence",
            f"{_PLANS}test_copies_and_casts_are_in_the_plan_with_their_bytes",
        ),
    ),
    BugReport(
        "B143",
        "pytorch/pytorch#114173",
        "a mask is expanded in memory to fix its alignment",
        checks=(
            "tests/test_contract.py::test_float_masks_of_any_broadcast_are_added_and_get_their_gradient",
            f"{_PLANS}test_copies_and_casts_are_in_the_plan_with_their_bytes",
        ),
    ),
    BugReport(
        "B145",
        "deepseek-ai/FlashMLA#91",
        "the size of a workspace overflows 32 bits",
        cases=("pinned/B145",),
    ),
)
"""All of them, in the order of their numbers."""

BY_ID: Mapping[str, BugReport] = MappingProxyType({report.id: report for report in BUG_REPORTS})
