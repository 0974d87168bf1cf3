"""An eagle draft's pass on a CPU as one call of `workers.engine.kernels.eagle`."""

import torch

from workers.engine.eagle import EagleModel, angle_table
from workers.engine.eagle_batch import LIKELIEST, EagleAnswer, EagleBatch
from workers.engine.eagle_store import EagleStore
from workers.engine.packed_weight import BLOCK, pack, quantise
from workers.engine.pass_work import COMPILES, ELEMENTS, LayerSizes, LayerTable, Rows, run_pass

if COMPILES:
    from workers.engine.kernels import eagle as program
    from workers.engine.kernels import steps

_DTYPES = (torch.float32, torch.bfloat16)


def can_compile(model: EagleModel) -> bool:
    """Whether its sizes and its place are what the kernels take."""
    layer = model.midlayer
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj, model.fc)
    return (
        COMPILES
        and model.embedding.device.type == "cpu"
        and model.dtype in _DTYPES
        and all(size % BLOCK == 0 for linear in linears for size in linear.weight.shape)
    )


class CompiledEagle:
    """`workers.engine.eagle_batch.EagleCompute` with packed copies of a model's weights.

    int8: whether they are rounded to that, but those that read features, of which a few are huge.
    """

    def __init__(self, model: EagleModel, *, int8: bool) -> None:
        config, layer = model.config, model.midlayer
        packing = quantise if int8 else pack
        self._sizes = layer_sizes(model)
        widest = max(2 * self._sizes.hidden, self._sizes.inner, self._sizes.asked)
        self._bytes_wide = widest if int8 else 0
        self._epsilon = torch.tensor([config.rms_norm_eps], dtype=torch.float32)
        self._angles = angle_table(model)
        self._embedding = model.embedding.to(model.dtype)
        self._norm_of_embedded = layer.input_layernorm.weight
        self._to_fuse, self._features = pack(model.fc.weight), model.fc.in_features
        self._table = LayerTable(1)
        for place, weight in (
            (steps.BEFORE_ATTENTION, layer.hidden_norm.weight),
            (steps.BEFORE_MLP, layer.post_attention_layernorm.weight),
            (steps.TO_QKV, packing(layer.qkv_proj.weight)),
            (steps.TO_OUT, packing(layer.o_proj.weight)),
            (steps.TO_GATE_UP, packing(layer.gate_up_proj.weight)),
            (steps.TO_DOWN, packing(layer.down_proj.weight)),
        ):
            self._table.put(0, place, weight)
        head = packing(model.lm_head.weight)
        self._table.put(1, steps.BEFORE_ATTENTION, model.norm.weight)
        self._table.put(1, steps.TO_QKV, head)
        self._vocabulary, self._outputs = config.draft_vocab_size, head.outputs
        self._likeliest = min(LIKELIEST, config.draft_vocab_size)
        weights = torch.int8 if int8 else model.dtype
        self._program = program.eagle_round(ELEMENTS[weights], ELEMENTS[model.dtype])

    def __call__(self, batch: EagleBatch, store: EagleStore) -> EagleAnswer:
        """As `EagleCompute` has it."""
        number, rows = len(batch.wanted), len(batch.tokens)
        given = batch.given.contiguous()
        assert given.shape[1] == (self._features if batch.fuse else self._sizes.hidden)
        x = given.new_empty(rows, self._sizes.hidden) if batch.fuse else given.clone()
        both = x.new_empty(rows, 2 * self._sizes.hidden)
        places = torch.empty(number, self._likeliest, dtype=torch.int64)
        probabilities = torch.empty(number, self._likeliest)
        self._table.put_store(0, store.keys, store.values)
        logits = x.new_empty(number, self._outputs)
        run_pass(
            self._program,
            program.NUMBER_OF_STEPS,
            self._table,
            self._sizes,
            self._epsilon,
            Rows(
                x,
                self._angles.at(batch.positions),
                batch.plan,
                len(store.keys),
                batch.wanted,
                logits,
            ),
            bytes_wide=self._bytes_wide,
            fields=program.ROUND_FIELDS,
            more=(
                batch.tokens.data_ptr(),
                self._embedding.data_ptr(),
                self._norm_of_embedded.data_ptr(),
                both.data_ptr(),
                *self._to_fuse.addresses(),
                given.data_ptr() if batch.fuse else 0,
                self._features,
                self._vocabulary,
                places.data_ptr(),
                probabilities.data_ptr(),
                self._likeliest,
            ),
        )
        return EagleAnswer(x, places, probabilities)


def layer_sizes(model: EagleModel) -> LayerSizes:
    """Of its only layer."""
    config = model.config
    return LayerSizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
