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

/// Rows of a head that kernels of GPUs read together.
const TILE: usize = 16;

/// Tokens at the end of a text by which it is judged which ones follow.
const JUDGED: usize = 512;

/// How many of `all` tokens, the first ones, to draft from behind `text`: an eighth of them, a quarter, a half, or all; the
/// fewest that hold all but one in 64 of its last tokens, so that what a part lacks costs less than reading the rest of the
/// head. Tokenizers number tokens about by how frequent they are, as byte-pair encoding finds them (Sennrich et al., arXiv
/// 1508.07909); drafting from frequent ones alone is due to FR-Spec (Zhao et al., arXiv 2502.14856).
pub fn frequent_tokens(text: &[u32], all: usize) -> usize {
    let last = &text[text.len().saturating_sub(JUDGED)..];
    let parts = [all / 8, all / 4, all / 2].map(|part| part.next_multiple_of(TILE));
    let lacks = |part: usize| last.iter().filter(|&&token| token as usize >= part).count();
    let few = last.len() / 64;
    let enough = parts.into_iter().find(|&part| lacks(part) <= few);
    // Short texts say little.
    enough.filter(|&part| part < all && few > 0).unwrap_or(all)
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

#[cfg(test)]
mod tests {
    use super::frequent_tokens;

    #[test]
    fn the_text_says_how_many_tokens_are_drafted_from() {
        let with = |rare: &[u32]| {
            let frequent = (0..640).map(|i| i * 7 % 100);
            frequent.chain(rare.iter().copied()).collect::<Vec<u32>>()
        };
        let all = 1000;
        // A multiple of 16 that is an eighth or more.
        assert_eq!(frequent_tokens(&with(&[]), all), 128);
        // 8 of the last 512 may be missing.
        assert_eq!(frequent_tokens(&with(&[999; 8]), all), 128);
        assert_eq!(frequent_tokens(&with(&[200; 9]), all), 256);
        assert_eq!(frequent_tokens(&with(&[400; 9]), all), 512);
        assert_eq!(frequent_tokens(&with(&[999; 9]), all), all);
        // Tokens that came long before do not count, and a short text says nothing.
        let early: Vec<u32> = [vec![999; 100], with(&[])].concat();
        assert_eq!(frequent_tokens(&early, all), 128);
        assert_eq!(frequent_tokens(&[1; 63], all), all);
        assert_eq!(frequent_tokens(&[1; 100], 16), 16);
    }
}
