"""The mixtures of experts (MoE) of the model types on the fused decoder: tensor names, and how each router chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parley.model.networks.config_fields import read_number
from parley.model.networks.rope import Unfusable, wrong_value
from parley.native.layer_shape import Routing

SIZE_UNIT = 8  # the kernels compute experts whose sizes are multiples of it


@dataclass(frozen=True)
class MixtureNames:
    """The names of a mixture's tensors in a layer. ``{}`` stands for the number of an expert.

    * ``gate_up`` and ``down`` without ``{}`` name tensors, not linear layers: each holds the weights of all experts.
    * ``transposed``: such a tensor is [experts, in, out]; False: it is [experts, out, in]; None: the shape decides, and
      [experts, out, in] has precedence.
    * ``gate_up`` lists the layers to be merged, as does ``shared_gate_up``; its outputs are those of gate and then of
      up, or of both in turn if ``interleaved``.
    * ``has_joined_rows``: such tensors are [experts * width, hidden], of experts of an inner size of ``width``, and
      ``down`` is, too.
    * ``choice_bias``, which is added to scores to choose experts, and ``shared_gate``, the logit of the shared expert's
      weight, need not exist.
    * ``has_biases``: the router has a bias, and each tensor of all experts one named NAME_bias [experts, out].
    * ``router_scale``: the weights of the norm before the router, without the factor 1 / sqrt(hidden).
    * ``expert_scales`` multiply the weights of chosen experts.
    * ``latent_down`` and ``latent_up`` are the linear layers of ``MixtureShape.latent_size``.
    """

    router: str = "mlp.gate"
    choice_bias: str | None = None
    gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str | None = None
    transposed: bool | None = False
    interleaved: bool = False
    has_joined_rows: bool = False
    has_biases: bool = False
    router_scale: str | None = None
    expert_scales: str | None = None
    latent_down: str = "mlp.latent_down"
    latent_up: str = "mlp.latent_up"

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor holds the weights of all experts."""
        return "{}" not in self.down


def every_layer(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: all have."""
    return True


def sparse_steps(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: each ``decoder_sparse_step``-th, unless it is listed in ``mlp_only_layers``."""
    return layer not in (fields["mlp_only_layers"] or ()) and (layer + 1) % (fields["decoder_sparse_step"] or 1) == 0


def flint_layer_mixtures(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: as ``sparse_steps``, or if no layers are listed, all but the first two."""
    return sparse_steps({**fields, "mlp_only_layers": (0, 1)} if fields["mlp_only_layers"] is None else fields, layer)


def after_dense_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: all but the first ``first_k_dense_replace``."""
    return bool(layer >= fields["first_k_dense_replace"])


def sparse_mlp_types(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: ``mlp_layer_types`` says so; without it, all but the first have."""
    types = fields["mlp_layer_types"]
    if types is None:
        return layer > 0
    if not isinstance(types, list) or len(types) != fields["num_hidden_layers"]:
        raise Unfusable("its mlp_layer_types do not say of each layer what it has")
    return bool(types[layer] == "sparse")


def sparse_or_all(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: ``mlp_layer_types`` says so; without it, all have."""
    return fields["mlp_layer_types"] is None or sparse_mlp_types(fields, layer)


def mixture_typed(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: ``layer_types`` says so (Nemotron-H)."""
    return bool(fields["layer_types"][layer] == "moe")


def jamba_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: each ``expert_layer_period``-th from ``expert_layer_offset`` on."""
    period = _read_count(fields, "expert_layer_period")
    return bool(layer % period == fields["expert_layer_offset"])


def exaone_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: as ``sparse_mlp_types``, or without types as ``after_dense_layers``."""
    return (after_dense_layers if fields["mlp_layer_types"] is None else sparse_mlp_types)(fields, layer)


def llama4_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: those in ``moe_layers``, or else each ``interleave_moe_layer_step``-th."""
    if isinstance(fields["moe_layers"], list):
        return layer in fields["moe_layers"]
    if fields["moe_layers"] is not None:
        raise wrong_value("moe_layers", fields["moe_layers"])
    return bool((layer + 1) % _read_count(fields, "interleave_moe_layer_step") == 0)


def ernie_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has a mixture: each ``moe_layer_interval``-th from ``moe_layer_start_index`` on, up to
    ``moe_layer_end_index``; -1 is the last."""
    first, last, step = (fields[f"moe_layer_{name}"] for name in ("start_index", "end_index", "interval"))
    return bool((layer + 1) % step == 0 and layer >= first and (last == -1 or layer <= last))


@dataclass(frozen=True)
class MixtureFamily:
    """How the mixtures of one model type differ from Mixtral's.

    * ``layouts``: the names of tensors, in each published form of its checkpoints.
    * ``normalized``: whether the weights of a row's experts are divided by their sum, or None if ``norm_topk_prob``
      says so.
    * ``is_sigmoid``: scores are sigmoids.
    * ``group_best``, ``weighs_inputs`` and ``chooses_by_logits``: of ``Routing``.
    * ``shared``: of ``Routing``, for models with shared experts.
    * ``jitter``: the config field with half the margin of a sparse mixer.
    """

    layouts: tuple[MixtureNames, ...]
    has_mixture: Callable[[Mapping[str, Any], int], bool] = every_layer
    normalized: bool | None = None
    is_sigmoid: bool = False
    group_best: int = 1
    shared: int = 0
    weighs_inputs: bool = False
    chooses_by_logits: bool = False
    jitter: str | None = None

    def read_routing(self, fields: Mapping[str, Any]) -> Routing:
        """Return the rule of the router. Raises Unfusable."""
        experts, experts_per_token = (_read_count(fields, name) for name in ("num_experts", "num_experts_per_tok"))
        groups, chosen_groups = _read_count(fields, "n_group", 1), _read_count(fields, "topk_group", 1)
        size = experts // groups
        if (
            experts % groups
            or chosen_groups > groups
            or experts_per_token > chosen_groups * size
            or self.group_best > size
        ):
            raise Unfusable(
                f"its routers choose {experts_per_token} of {experts} experts in {chosen_groups} of {groups} groups"
            )
        return Routing(
            experts=experts,
            experts_per_token=experts_per_token,
            groups=groups,
            chosen_groups=chosen_groups,
            group_best=self.group_best,
            sigmoid=self.is_sigmoid,
            normalized=bool(fields["norm_topk_prob"]) if self.normalized is None else self.normalized,
            shared=self.shared if self.read_shared_width(fields) else 0,
            weighs_inputs=self.weighs_inputs,
            chooses_by_logits=self.chooses_by_logits,
            scale=float(fields.get("routed_scaling_factor") or 1.0),
            margin=-1.0 if self.jitter is None else 2 * read_number(fields, self.jitter),
        )

    def read_expert_width(self, fields: Mapping[str, Any]) -> int:
        """Return the inner size of an expert's MLP. Raises Unfusable."""
        return _check_unit(_read_count(fields, "moe_intermediate_size", fields["intermediate_size"]))

    def read_shared_width(self, fields: Mapping[str, Any]) -> int:
        """Return the inner size of the shared expert's MLP, 0 if there is none. Raises Unfusable."""
        if not self.shared:
            return 0
        if "shared_expert_intermediate_size" in fields:
            width = fields["shared_expert_intermediate_size"]
            return 0 if width == 0 else _check_unit(_read_count(fields, "shared_expert_intermediate_size"))
        count = _read_count(fields, "n_shared_experts") if fields.get("n_shared_experts") else 0
        return count * self.read_expert_width(fields)

    def read_latent_size(self, fields: Mapping[str, Any]) -> int:
        """Return the size of what chosen experts read, 0 if it is the hidden size. Raises Unfusable."""
        if fields.get("moe_latent_size") is None:
            return 0
        if fields["mlp_bias"]:
            raise Unfusable("the latents of its experts have biases")
        size = _read_count(fields, "moe_latent_size")
        if size % SIZE_UNIT:
            raise Unfusable(f"its experts read latents of {size} numbers, which is no multiple of {SIZE_UNIT}")
        return size


def _read_count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name) or default
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # one for each layer, all alike
    if type(value) is not int or value < 1:
        raise wrong_value(name, fields.get(name))
    return value


def _check_unit(width: int) -> int:
    if width % SIZE_UNIT:
        raise Unfusable(f"its experts have {width} numbers inside, which is no multiple of {SIZE_UNIT}")
    return width


def _both_layouts(names: MixtureNames) -> tuple[MixtureNames, ...]:
    """Return the names of tensors of one expert each, and those of newer files, where a tensor holds all experts."""
    return names, replace(names, router="mlp.gate", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj")


def gguf_layout(names: MixtureNames) -> MixtureNames:
    """Return the names of tensors of GGUF files, as ``gguf/architectures.py`` makes them."""
    gate_up = ("mlp.experts.gate_exps.weight", "mlp.experts.up_exps.weight")
    down = "mlp.experts.down_exps.weight"
    return replace(names, router="mlp.gate", gate_up=gate_up, down=down, transposed=False, interleaved=False)


def joined_layouts(layouts: tuple[MixtureNames, ...]) -> list[MixtureNames]:
    """Return the names of tensors of GGUF files that have the gates and ups of all experts as one tensor."""
    stem, suffixes = "mlp.experts.", ("gate_exps.weight", "up_exps.weight")
    parts = tuple(stem + end for end in suffixes)
    return [replace(names, gate_up=(stem + "gate_up_exps.weight",)) for names in layouts if names.gate_up == parts]


def mlx_layouts(layouts: tuple[MixtureNames, ...], *, is_gated: bool) -> list[MixtureNames]:
    """Return the names of tensors in folders of MLX, which hold all experts, for a family with these layouts."""
    parts, last = (("gate_proj", "up_proj"), "down_proj") if is_gated else (("fc1",), "fc2")
    mlx_names = []
    for names in layouts:
        block = names.down.partition(".")[0]
        for experts in (f"{block}.switch_mlp.", f"{block}.switch_glu.", f"{block}.experts."):
            gate_up = tuple(f"{experts}{part}.weight" for part in parts)
            down = f"{experts}{last}.weight"
            mlx_names.append(replace(names, gate_up=gate_up, down=down, transposed=False, interleaved=False))
    return mlx_names


MIXTRAL_NAMES = MixtureNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
MIXTRAL_MIXTURE = MixtureFamily((*_both_layouts(MIXTRAL_NAMES), gguf_layout(MIXTRAL_NAMES)), normalized=True)
SMALL_THINKER_NAMES = MixtureNames(
    router="block_sparse_moe.primary_router",
    gate_up=("block_sparse_moe.experts.{}.gate", "block_sparse_moe.experts.{}.up"),
    down="block_sparse_moe.experts.{}.down",
)
SMALL_THINKER_MIXTURE = MixtureFamily(
    (SMALL_THINKER_NAMES, gguf_layout(SMALL_THINKER_NAMES)), normalized=True, is_sigmoid=True
)
MINIMAX_MIXTURE = MixtureFamily(
    (
        replace(MIXTRAL_NAMES, choice_bias="block_sparse_moe.e_score_correction_bias"),
        replace(_both_layouts(MIXTRAL_NAMES)[1], choice_bias="mlp.e_score_correction_bias"),
        replace(gguf_layout(MIXTRAL_NAMES), choice_bias="mlp.gate.e_score_correction_bias"),
    ),
    normalized=True,
    is_sigmoid=True,
)
OLMOE_MIXTURE = MixtureFamily((*_both_layouts(MixtureNames()), gguf_layout(MixtureNames())))
GRANITE_MIXTURE = MixtureFamily(
    (
        *(
            MixtureNames(
                router=router,
                gate_up=(gate_up,),
                down=down,
                shared_gate_up=("shared_mlp.input_linear",),
                shared_down="shared_mlp.output_linear",
            )
            for router, gate_up, down in (
                (
                    "block_sparse_moe.router.layer",
                    "block_sparse_moe.input_linear.weight",
                    "block_sparse_moe.output_linear.weight",
                ),
                (
                    "block_sparse_moe.router",
                    "block_sparse_moe.experts.gate_up_proj",
                    "block_sparse_moe.experts.down_proj",
                ),
            )
        ),
        gguf_layout(MixtureNames()),
    ),
    normalized=True,
    shared=1,
)
QWEN2_NAMES = MixtureNames(shared_gate="mlp.shared_expert_gate")
QWEN2_MIXTURE = MixtureFamily(
    (*_both_layouts(QWEN2_NAMES), gguf_layout(QWEN2_NAMES)), has_mixture=sparse_steps, shared=2
)
GPT_OSS_NAMES = MixtureNames(
    router="mlp.router",
    gate_up=("mlp.experts.gate_up_proj",),
    down="mlp.experts.down_proj",
    transposed=True,
    interleaved=True,
    has_biases=True,
)
GPT_OSS_MIXTURE = MixtureFamily(
    (GPT_OSS_NAMES, replace(gguf_layout(GPT_OSS_NAMES), router="mlp.router")),
    normalized=True,
)
QWEN3_MIXTURE = MixtureFamily((*_both_layouts(MixtureNames()), gguf_layout(MixtureNames())), has_mixture=sparse_steps)
MELLUM_MIXTURE = replace(OLMOE_MIXTURE, has_mixture=sparse_or_all)
FLINT_MIXTURE = MixtureFamily(
    _both_layouts(MixtureNames()),
    has_mixture=flint_layer_mixtures,
    is_sigmoid=True,
    shared=1,
)
QWEN3_VL_MIXTURE = MixtureFamily(
    (
        MixtureNames(gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj", transposed=None),
        gguf_layout(MixtureNames()),
    ),
    has_mixture=sparse_steps,
    normalized=True,
)
DEEPSEEK_NAMES = MixtureNames(
    choice_bias="mlp.gate.e_score_correction_bias",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
DEEPSEEK_V2_NAMES = replace(DEEPSEEK_NAMES, choice_bias=None)
DEEPSEEK_V2_MIXTURE = MixtureFamily(
    (*_both_layouts(DEEPSEEK_V2_NAMES), gguf_layout(DEEPSEEK_V2_NAMES)),
    has_mixture=after_dense_layers,
    normalized=False,
    shared=1,
)
DEEPSEEK_V1_MIXTURE = replace(DEEPSEEK_V2_MIXTURE, normalized=None)
COHERE2_MIXTURE = replace(DEEPSEEK_V2_MIXTURE, has_mixture=exaone_layers, normalized=True)
MISTRAL4_MIXTURE = replace(DEEPSEEK_V2_MIXTURE, normalized=None, group_best=2)
ERNIE_MIXTURE = MixtureFamily(
    (
        replace(DEEPSEEK_NAMES, choice_bias="mlp.moe_statics.e_score_correction_bias"),
        replace(_both_layouts(DEEPSEEK_NAMES)[1], choice_bias="mlp.gate.moe_statics.e_score_correction_bias"),
        gguf_layout(DEEPSEEK_NAMES),
    ),
    has_mixture=ernie_layers,
    normalized=True,
    shared=1,
)
GLM4_MIXTURE = MixtureFamily(
    (*_both_layouts(DEEPSEEK_NAMES), gguf_layout(DEEPSEEK_NAMES)),
    has_mixture=after_dense_layers,
    is_sigmoid=True,
    group_best=2,
    shared=1,
)
GLM4_LITE_MIXTURE = replace(GLM4_MIXTURE, has_mixture=sparse_mlp_types)
KIMI_NAMES = replace(DEEPSEEK_NAMES, gate_up=("mlp.experts.{}.w1", "mlp.experts.{}.w3"), down="mlp.experts.{}.w2")
KIMI_MIXTURE = replace(GLM4_MIXTURE, layouts=(KIMI_NAMES, *GLM4_MIXTURE.layouts), has_mixture=exaone_layers)
BAILING_MIXTURE = replace(
    KIMI_MIXTURE,
    layouts=(
        replace(DEEPSEEK_NAMES, choice_bias="mlp.gate.expert_bias"),
        *_both_layouts(DEEPSEEK_NAMES),
        gguf_layout(DEEPSEEK_NAMES),
    ),
)
QWEN3_5_MIXTURE = replace(QWEN2_MIXTURE, has_mixture=every_layer, normalized=True)
LFM2_NAMES = MixtureNames(
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    gate_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
)
LFM2_MIXTURE = MixtureFamily(
    (
        LFM2_NAMES,
        replace(LFM2_NAMES, gate_up=("feed_forward.experts.gate_up_proj",), down="feed_forward.experts.down_proj"),
        gguf_layout(LFM2_NAMES),
    ),
    has_mixture=after_dense_layers,
    is_sigmoid=True,
)
LLAMA4_NAMES = MixtureNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    down="feed_forward.experts.{}.down_proj",
    shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
LLAMA4_MIXTURE = MixtureFamily(
    (
        replace(
            LLAMA4_NAMES,
            gate_up=("feed_forward.experts.gate_up_proj",),
            down="feed_forward.experts.down_proj",
            transposed=True,
        ),
        LLAMA4_NAMES,
        gguf_layout(LLAMA4_NAMES),
    ),
    has_mixture=llama4_layers,
    normalized=False,
    is_sigmoid=True,
    shared=1,
    weighs_inputs=True,
)
PHIMOE_MIXTURE = MixtureFamily(
    (MIXTRAL_NAMES, replace(_both_layouts(MIXTRAL_NAMES)[1], router="mlp.router"), gguf_layout(MIXTRAL_NAMES)),
    normalized=False,
    jitter="router_jitter_noise",
)
EXAONE_MIXTURE = replace(
    GLM4_MIXTURE,
    layouts=(
        replace(DEEPSEEK_NAMES, choice_bias="mlp.e_score_correction_bias"),
        *_both_layouts(DEEPSEEK_NAMES),
        gguf_layout(DEEPSEEK_NAMES),
    ),
    has_mixture=exaone_layers,
)
KOLIBRI_MIXTURE = MixtureFamily(
    (
        replace(DEEPSEEK_NAMES, choice_bias="moe.router.expert_bias"),
        *_both_layouts(DEEPSEEK_NAMES),
        gguf_layout(DEEPSEEK_NAMES),
    ),
    is_sigmoid=True,
    shared=1,
    chooses_by_logits=True,
)
AXK1_MIXTURE = replace(GLM4_MIXTURE, has_mixture=exaone_layers)
SHARED_MLP: dict[str, Any] = {
    "shared_gate_up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    "shared_down": "mlp.shared_mlp.down_proj",
}
HUNYUAN_NAMES = MixtureNames(**SHARED_MLP)
HUNYUAN_MIXTURE = MixtureFamily(
    (
        *(replace(names, router="mlp.gate.wg") for names in _both_layouts(HUNYUAN_NAMES)),
        gguf_layout(HUNYUAN_NAMES),
    ),
    normalized=True,
    shared=1,
)
HY3_MIXTURE = MixtureFamily(
    (
        replace(
            DEEPSEEK_NAMES,
            router="mlp.router.gate",
            choice_bias="mlp.expert_bias",
            **SHARED_MLP,
        ),
        replace(_both_layouts(DEEPSEEK_NAMES)[1], choice_bias="mlp.e_score_correction_bias"),
        gguf_layout(DEEPSEEK_NAMES),
    ),
    has_mixture=sparse_mlp_types,
    normalized=True,
    is_sigmoid=True,
    shared=1,
)
AFMOE_NAMES = replace(DEEPSEEK_NAMES, router="mlp.router.gate", choice_bias="mlp.expert_bias")
AFMOE_MIXTURE = MixtureFamily(
    (AFMOE_NAMES, replace(_both_layouts(AFMOE_NAMES)[1], router="mlp.router.gate"), gguf_layout(DEEPSEEK_NAMES)),
    has_mixture=after_dense_layers,
    normalized=True,
    is_sigmoid=True,
    shared=1,
)
LAGUNA_NAMES = replace(
    DEEPSEEK_NAMES,
    choice_bias="mlp.experts.e_score_correction_bias",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)
LAGUNA_MIXTURE = MixtureFamily(
    (LAGUNA_NAMES, _both_layouts(DEEPSEEK_NAMES)[1], gguf_layout(DEEPSEEK_NAMES)),
    has_mixture=sparse_mlp_types,
    normalized=True,
    is_sigmoid=True,
    shared=1,
)
MIMO_MIXTURE = replace(GLM4_LITE_MIXTURE, shared=0)
NEMOTRON_NAMES = MixtureNames(
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    gate_up=("mixer.experts.{}.up_proj",),
    down="mixer.experts.{}.down_proj",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    latent_down="mixer.fc1_latent_proj",
    latent_up="mixer.fc2_latent_proj",
)
NEMOTRON_MIXTURE = MixtureFamily(
    (
        NEMOTRON_NAMES,
        replace(NEMOTRON_NAMES, gate_up=("mixer.experts.up_proj",), down="mixer.experts.down_proj"),
        replace(
            NEMOTRON_NAMES, gate_up=("mixer.experts.up_exps.weight",), down="mixer.experts.down_exps.weight"
        ),  # of GGUF files
    ),
    has_mixture=mixture_typed,
    is_sigmoid=True,
    group_best=2,
    shared=1,
)
JAMBA_NAMES = MixtureNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    down="feed_forward.experts.{}.down_proj",
)
JAMBA_MIXTURE = MixtureFamily(
    (
        JAMBA_NAMES,
        replace(JAMBA_NAMES, gate_up=("feed_forward.experts.gate_up_proj",), down="feed_forward.experts.down_proj"),
        gguf_layout(JAMBA_NAMES),
    ),
    has_mixture=jamba_layers,
    normalized=False,
)
GEMMA4_NAMES = MixtureNames(
    router="router.proj",
    gate_up=("experts.gate_up_proj",),
    down="experts.down_proj",
    router_scale="router.scale",
    expert_scales="router.per_expert_scale",
)
GEMMA4_MIXTURE = MixtureFamily(
    (
        GEMMA4_NAMES,
        *(
            replace(
                GEMMA4_NAMES,
                gate_up=(f"{block}.{{}}.gate_proj", f"{block}.{{}}.up_proj"),
                down=f"{block}.{{}}.down_proj",
            )
            for block in ("experts", "moe.experts")
        ),
        replace(GEMMA4_NAMES, gate_up=("experts.gate_up_exps.weight",), down="experts.down_exps.weight"),
        replace(
            GEMMA4_NAMES,
            gate_up=("experts.gate_exps.weight", "experts.up_exps.weight"),
            down="experts.down_exps.weight",
        ),
    ),
    normalized=True,
)
