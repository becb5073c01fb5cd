//! The weights of an EAGLE-3 head, as a device holds them, and drafters of heads.

use crate::error::{Error, Result};
use crate::interface::{Drafter, Session, StreamHead};
use nq_formats::Weight;
use nq_formats::eagle::{EagleHead, Half, TAPS};
use nq_model::forward::{Layer, VectorSpec};
use nq_model::names::HEAD;
use nq_model::{Dims, LinearKind, LinearSpec, ModelConfig, NormKind, Product};

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
    /// q, k and v of the normalized embedding, `[q_dim + 2 kv_dim, hidden]`, to which attention adds those of the
    /// normalized stream.
    pub qkv_of_embedding: L,
    /// The layer, whose attention has the q, k and v of the stream.
    pub layer: Layer<L, N>,
    /// `[hidden]`
    pub norm: N,
    /// `[draft vocab, hidden]`
    pub head: L,
}

impl<L, N> HeadWeights<L, N> {
    /// Reads `head`, whose layer is that of a model of shape `c`: weights through `linear`, which gets the name of a
    /// product and the weights that share its input, gains through `norm`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; errors of the two functions.
    pub fn read(
        head: &EagleHead,
        c: &ModelConfig,
        mut linear: impl FnMut(&'static str, &[&Weight]) -> Result<L>,
        mut norm: impl FnMut(Vec<f32>) -> Result<N>,
    ) -> Result<Self> {
        let (h, spec, store) = (c.hidden_size, c.layer(0), head.store.as_ref());
        let mut read = |name: &'static str, parts: Vec<(String, Dims)>| {
            let read = |(part, dims): &(String, _)| store.matrix(part, *dims);
            let weights: Vec<Weight> = parts.iter().map(read).collect::<Result<_, _>>()?;
            linear(name, &weights.iter().collect::<Vec<_>>())
        };
        let mut gains =
            |part: &str| -> Result<N> { norm(store.vector(&head.name(part), h)?.to_f32()?) };
        let qkv = |product: &Product, half: Half| {
            let part = |l: &LinearSpec| (head.half(&format!(".{}", l.suffix), half), l.dims(c));
            product.linears.iter().map(part).collect()
        };
        let part = |l: &LinearSpec| (head.name(&format!(".{}", l.suffix)), l.dims(c));
        Ok(HeadWeights {
            fc: read("fc", vec![(head.name("fc"), Dims::new(h, TAPS * h))])?,
            embedding_norm: gains(".input_layernorm")?,
            qkv_of_embedding: read("qkv of embedding", qkv(spec.products()[0], Half::Embedding))?,
            layer: Layer::new(
                0,
                spec,
                |product| match product.linears[0].kind {
                    LinearKind::Q => read("qkv of stream", qkv(product, Half::Stream)),
                    _ => read(product.name, product.linears.iter().map(part).collect()),
                },
                |vector| match vector {
                    VectorSpec::Norm(norm) => match norm.kind {
                        NormKind::Attention => gains(".hidden_norm"),
                        _ => gains(&format!(".{}", norm.suffix)),
                    },
                    VectorSpec::Bias(_) | VectorSpec::Row(_) => {
                        unreachable!("Llama's layers have no other vectors")
                    }
                },
            )?,
            norm: gains("norm")?,
            head: read(
                "draft head",
                vec![(HEAD.to_owned(), Dims::new(head.config.draft_vocab_size, h))],
            )?,
        })
    }
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
