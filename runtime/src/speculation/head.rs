//! The weights of an EAGLE-3 head, as a device holds them, and drafters of heads.

use crate::error::{Error, Result};
use crate::interface::{Drafter, Session, StreamHead};
use crate::rope::Rotary;
use nq_formats::eagle::{EagleHead, Half, TAPS};
use nq_formats::names::HEAD;
use nq_formats::{ModelConfig, Weight};

/// Drafts with `head` for `session`, whose residual streams it reads from now on.
///
/// # Errors
/// [`Error::Unsupported`] for sessions that do not give them to it.
pub fn drafter(head: &StreamHead, session: &mut dyn Session) -> Result<Box<dyn Drafter>> {
    match session.streams() {
        Some(streams) => streams.drafter(head),
        None => Err(Error::Unsupported {
            engine: "nq",
            what: "drafts from residual streams",
            expected: "a model that runs on nq's fused kernels".into(),
            found: "one that does not".into(),
        }),
    }
}

/// Matrices as `L`, gains of norms as `N`.
pub struct HeadWeights<L, N> {
    /// `[hidden, 3 hidden]`
    pub fc: L,
    /// Of a token's embedding, `[hidden]`.
    pub embedding_norm: N,
    /// Of the stream before it, `[hidden]`.
    pub stream_norm: N,
    /// q, k and v of the normalized embedding, `[q_dim + 2 kv_dim, hidden]`.
    pub qkv_of_embedding: L,
    /// What the normalized stream adds to them, of the same shape.
    pub qkv_of_stream: L,
    /// `[hidden, q_dim]`
    pub o: L,
    /// `[hidden]`
    pub mlp_norm: N,
    /// `[2 intermediate, hidden]`
    pub gate_up: L,
    /// `[hidden, intermediate]`
    pub down: L,
    /// `[hidden]`
    pub norm: N,
    /// `[draft vocab, hidden]`
    pub head: L,
}

/// The product whose outputs an epilogue takes in pairs.
pub const GATE_UP: &str = "gate_up";

impl<L, N> HeadWeights<L, N> {
    /// Reads `head`: weights through `linear`, which gets the name of a product and the weights that share its
    /// input, gains through `norm`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; errors of the two functions.
    pub fn read(
        head: &EagleHead,
        mut linear: impl FnMut(&'static str, &[&Weight]) -> Result<L>,
        mut norm: impl FnMut(Vec<f32>) -> Result<N>,
    ) -> Result<Self> {
        let (c, store) = (&head.config, head.store.as_ref());
        let (h, d, width) = (c.hidden_size, c.head_dim, c.intermediate_size);
        let (q, kv) = (c.num_attention_heads * d, c.num_key_value_heads * d);
        let mut product = |name: &'static str, parts: &[(String, usize)], inputs: usize| {
            let read = |(part, rows): &(String, usize)| store.matrix(part, (*rows, inputs));
            let weights: Vec<Weight> = parts.iter().map(read).collect::<Result<_, _>>()?;
            let parts: Vec<&Weight> = weights.iter().collect();
            linear(name, &parts)
        };
        let qkv = |half: Half| {
            let part = |(part, rows): (&str, usize)| (head.half(part, half), rows);
            [
                (".self_attn.q_proj", q),
                (".self_attn.k_proj", kv),
                (".self_attn.v_proj", kv),
            ]
            .map(part)
        };
        let part = |part: &str, rows: usize| (head.name(part), rows);
        let mut gains =
            |part: &str| -> Result<N> { norm(store.vector(&head.name(part), h)?.to_f32()?) };
        Ok(HeadWeights {
            fc: product("fc", &[part("fc", h)], TAPS * h)?,
            embedding_norm: gains(".input_layernorm")?,
            stream_norm: gains(".hidden_norm")?,
            qkv_of_embedding: product("qkv of embedding", &qkv(Half::Embedding), h)?,
            qkv_of_stream: product("qkv of stream", &qkv(Half::Stream), h)?,
            o: product("o", &[part(".self_attn.o_proj", h)], q)?,
            mlp_norm: gains(".post_attention_layernorm")?,
            gate_up: product(
                GATE_UP,
                &[part(".mlp.gate_proj", width), part(".mlp.up_proj", width)],
                h,
            )?,
            down: product("down", &[part(".mlp.down_proj", h)], width)?,
            norm: gains("norm")?,
            head: product("draft head", &[part(HEAD, c.draft_vocab_size)], h)?,
        })
    }
}

/// The rotary embedding of `head`, which drafts for `model`.
pub fn rotary(head: &EagleHead, model: &ModelConfig) -> Rotary {
    Rotary::new(&ModelConfig {
        head_dim: head.config.head_dim,
        rope: head.config.rope,
        ..model.clone()
    })
}

/// The error of a head whose streams overflow or are no numbers.
pub const EAGLE_NOT_FINITE: Error = Error::NotFinite {
    what: "the EAGLE-3 head behind the output",
    layer: 0,
};

/// The error of an MTP layer whose values overflow or are no numbers.
pub const MTP_NOT_FINITE: Error = Error::NotFinite {
    what: "the MTP layer behind the output",
    layer: 0,
};
