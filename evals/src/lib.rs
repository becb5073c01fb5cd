//! nq: perplexity, KL divergence, speed, and their reports
