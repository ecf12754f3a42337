"""Sizes of tiny models, by every name that configs have for a size."""

from __future__ import annotations

VOCABULARY = 97
POSITIONS = 64
WINDOW = 8
"""Shorter than most prompts of the sweep."""

_SIZES: dict[str, int | bool | None] = {
    "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab": VOCABULARY,
    "max_position_embeddings n_positions n_ctx max_sequence_length max_seq_len "
    "max_target_positions mamba_d_ssm": POSITIONS,
    "sliding_window window_size attention_window attention_chunk_size local_attention "
    "attention_window_size local_attention_window_len": WINDOW,
    "hidden_size d_model n_embd embedding_size word_embed_proj_dim hidden_dim lru_width "
    "conv_dim attention_hidden_size hidden_size_global adapter_in_dim adapter_out_dim "
    "adapter_input_size": 32,
    "intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size ff_dim "
    "intermediate_size_mlp n_inner mlp_hidden_size feed_forward_size d_inner dff": 48,
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_intermediate_size expert_hidden_size moe_ffn_hidden_size moe_latent_size q_lora_rank "
    "kv_lora_rank v_head_dim qk_head_dim mamba_d_head mamba_head_dim attention_head_dim "
    "moe_shared_expert_intermediate_size router_hidden_size": 16,
    "head_dim d_kv qk_rope_head_dim qk_nope_head_dim rope_head_dim global_head_dim swa_head_dim "
    "swa_v_head_dim kv_channels index_head_dim linear_key_head_dim linear_value_head_dim "
    "hidden_size_per_layer_input state_size ssm_state_size mamba_d_state attention_head_size "
    "d_head": 8,
    "num_attention_heads n_head num_heads n_heads decoder_attention_heads encoder_attention_heads "
    "query_heads swa_num_attention_heads mamba_n_heads mamba_num_heads linear_num_value_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts index_topk rotary_dim "
    "time_step_rank mamba_dt_rank laurel_rank num_latents": 4,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_key_value_heads num_global_key_value_heads swa_num_key_value_heads kv_heads kv_n_heads "
    "linear_num_key_heads num_experts_per_tok moe_k moe_topk moe_top_k top_k_experts "
    "n_mamba_heads index_n_heads num_attention_groups mamba_expand depth": 2,
    "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace num_codebooks "
    "num_global_layers num_sparse_encoder_layers num_sparse_decoder_layers mamba_ngroups "
    "mamba_n_groups n_groups num_dense_layers": 1,
    "num_kv_shared_layers": 0,
    # A config derives these from its number of layers unless they are set.
    "layer_types mlp_layer_types block_types layers_block_type moe_layers": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 3,
    "mask_token_id": 4,
    "unk_token_id": 5,
    "is_decoder": True,
    # With tied embeddings the argmax would mostly be the last token again.
    "tie_word_embeddings": False,
}
TINY = {name: value for names, value in _SIZES.items() for name in names.split()}
