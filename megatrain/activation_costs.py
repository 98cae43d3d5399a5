"""Bytes on the device that a step needs besides states: hidden states, graphs of layers, logits, gradients on their way.

Functions take `work` and `plan`, as those of `costs`.
"""

from megatrain.plan import Plan
from megatrain.work import Work, group_tokens, micro_batch_tokens, micro_batches

HIDDEN_SPARES = 4  # hidden states alive besides one per micro-batch: input, output and gradient of each, of the one in work
GRAPH_WIDTHS = 34  # saved and transient values of an eager layer, in units of its width: norms in fp32, q/k/v, rotary, residuals
GRAPH_INTERMEDIATES = 6  # the same of a gated MLP, in units of its intermediate size: gate, up, act, product, two gradients
FUSED_WIDTHS = 8  # the same of a compiled layer; 5.3 and 6 were measured for a layer of Qwen2.5-7B
FUSED_INTERMEDIATES = 6
ALLOCATOR_LOSS = 6  # a sixth more is reserved on a GPU: holes between tensors of different sizes
FUSED_LOSS_ROWS = 4  # chunks of logits have so many times the rows when loss and gradient are one kernel
GRAPH_SCORES = 6  # the score matrix where it is kept, in compute type: scores, probabilities in fp32, their gradients


def hidden_state_bytes(work: Work, plan: Plan) -> int:
    """One hidden state per micro-batch of a group, and a few of the one in work."""
    alive = min(plan.group_micro_batches, micro_batches(work, plan)) + HIDDEN_SPARES
    return alive * micro_batch_tokens(work, plan) * work.shape.hidden_size * work.precision.weight_bytes


def stored_input_bytes(work: Work, plan: Plan) -> int:
    """The input of every layer for every token of a group, on `plan.inputs_tier`."""
    return len(work.shape.layers) * group_tokens(work, plan) * work.shape.hidden_size * work.precision.weight_bytes


def activation_bytes(work: Work, plan: Plan) -> int:
    """The peak besides stored inputs: in a layer's backward or in the head, which never run at once."""
    gradients = work.largest_layer * work.precision.weight_bytes
    layer = layer_graph_bytes(work, plan) + (gradients // 4 if work.fused else gradients)  # at the peak few of them exist yet
    layer = max(layer, gradients)
    head = logits_chunk_bytes(work, plan) + work.shape.vocab_size * work.shape.hidden_size * work.precision.weight_bytes
    largest = max(layer, head)
    lost = largest // ALLOCATOR_LOSS if work.on_gpu else 0
    return hidden_state_bytes(work, plan) + layer_call_bytes(work, plan) + largest + lost


def layer_graph_bytes(work: Work, plan: Plan) -> int:
    """What a layer's backward keeps of its recompute, for one micro-batch: an upper bound."""
    shape = work.shape
    widths, intermediates = (FUSED_WIDTHS, FUSED_INTERMEDIATES) if work.fused else (GRAPH_WIDTHS, GRAPH_INTERMEDIATES)
    per_token = widths * max(shape.hidden_size, shape.num_heads * shape.head_dim) + intermediates * shape.intermediate_size
    if shape.eager_attention:
        per_token += GRAPH_SCORES * shape.num_heads * work.sequence_length
    return micro_batch_tokens(work, plan) * per_token * work.precision.weight_bytes


def layer_call_bytes(work: Work, plan: Plan) -> int:
    """What layers are called with besides hidden states, kept for every micro-batch of a group: masks and rotary tables.

    A mask is a row of S values per token: bits as bytes, or numbers where the score matrix is kept. Layers of several
    kinds (sliding and full attention) have a mask each. Attention over packed documents keeps none; where there is no
    kernel for it, a mask is made for each call, once as bits and once as numbers.
    """
    shape, length, width = work.shape, work.sequence_length, work.precision.weight_bytes
    kinds = min(2, len({layer.kind for layer in shape.layers}))
    rotary = group_tokens(work, plan) * kinds * 2 * shape.head_dim * width
    if not shape.packed_attention:
        return rotary + group_tokens(work, plan) * kinds * length * (width if shape.eager_attention else 1)
    flash = work.on_gpu and width < 4
    return rotary + (0 if flash else micro_batch_tokens(work, plan) * length * (1 + width))


def loss_chunk_rows(vocab_size: int) -> int:
    """Rows of logits that are made, used and dropped at once: about 64 Mi logits, between 64 and 4096 rows."""
    return min(max(2**26 // vocab_size, 64), 4096)


def logits_chunk_bytes(work: Work, plan: Plan) -> int:
    """One chunk: logits and their gradient in the compute type; not fused, three values in fp32 and in fewer rows."""
    rows, each = loss_chunk_rows(work.shape.vocab_size), 3 * 4 + 2 * work.precision.weight_bytes
    if work.fused:
        rows, each = rows * FUSED_LOSS_ROWS, 2 * work.precision.weight_bytes
    return min(rows, micro_batch_tokens(work, plan)) * work.shape.vocab_size * each
