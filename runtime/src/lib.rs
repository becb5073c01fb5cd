//! nq: Qwen3 on a device: weights, KV cache, forward, tokenizer, chat template, sampling
