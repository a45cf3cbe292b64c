"""Tiny models of Nemotron's families that read images, video and sound, for ``multimodal_models.FAMILIES``."""

from typing import Any

from support.media_family_shape import TEXT, VISION, Family

NEMOTRON_TEXT = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"} | {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
}


def _nemotron_omni(tokenizer: Any) -> Any:
    import transformers

    means = {"norm_mean": [0.5, 0.4, 0.3], "norm_std": [0.3, 0.4, 0.5]}
    image = transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(
        patch_size=8, min_num_patches=8, max_num_patches=64, **means
    )
    video = transformers.NemotronH_Omni_Reasoning_V3VideoProcessor(
        patch_size=8, video_target_num_patches=16, do_sample_frames=False, **means
    )
    return transformers.NemotronH_Omni_Reasoning_V3Processor(
        image, video, tokenizer, transformers.ParakeetFeatureExtractor(feature_size=16)
    )


NEMOTRON_MODELS: dict[str, Family] = {
    "nemotron_h_omni": Family(
        {
            "text_config": NEMOTRON_TEXT,
            "vision_config": {name: value for name, value in VISION.items() if name != "intermediate_size"}
            | {"model_type": "radio", "mlp_ratio": 1.5, "patch_size": 8, "max_img_size": 64}
            | {"video_temporal_patch_size": 2},
            "audio_config": VISION
            | {"num_mel_bins": 16, "subsampling_conv_channels": 16, "projection_hidden_size": 48}
            | {"projection_bias": True},
            "vision_hidden_size": 32,
            "projector_hidden_size": 48,
        },
        {"image_token": "<image>", "audio_token": "<so_embedding>"},
        {"image": "<image>\n", "video": "<video>\n", "audio": "<so_embedding>\n"},
        _nemotron_omni,
        {"image_token_id": "image_token", "audio_token_id": "audio_token"},
        tiles=["<img>", "</img>", "<so_start>", "<so_end>"],
    ),
}
