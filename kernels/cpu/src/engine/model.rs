//! A model on the CPU.

use super::streams::{Mix, MixBuffers};
use super::weights::CpuLayer;
use crate::{Cpu, Linear};
use nq_formats::Weight;
use nq_kernels::Activations;
use nq_model::ModelConfig;
use nq_runtime::interface::LoadOptions;
use nq_runtime::models::Ending;
use nq_runtime::ngrams::NgramRows;
use nq_runtime::rope::Rotary;
use nq_runtime::{Error, Result};

/// A model packed for this CPU.
pub(crate) struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) cpu: Cpu,
    pub(super) rotary: Rotary,
    /// `[vocab, hidden]`, canonical: only rows that are looked up are read. `None` if the
    /// head, whose rows can be read back, is the same matrix.
    pub(super) embedding: Option<Weight>,
    pub(super) layers: Vec<CpuLayer>,
    /// Tables of n-grams of those layers that have one, in files: only rows that are looked up are read.
    pub(super) tables: Vec<Option<NgramRows>>, // [layers]
    pub(super) ending: CpuEnding,
    pub(super) head: Linear, // [vocab, hidden]
}

/// What stands between the last layer and the head.
pub(super) struct CpuEnding {
    norm: Vec<f32>, // [hidden], or [streams, hidden]
    /// What weighs several streams.
    pub(super) mix: Option<[Linear; 2]>,
}

impl CpuEnding {
    /// Packs it. Its matrices are not rounded, whatever the options say.
    pub(super) fn pack(cpu: &Cpu, options: &LoadOptions, ending: &Ending) -> Result<Self> {
        let linear = |w: &Weight| {
            let packed = Linear::new(cpu, &[w], Activations::F32, options.kernels)?;
            Ok::<_, Error>(packed.named("mix"))
        };
        Ok(CpuEnding {
            norm: ending.norm.to_f32()?,
            mix: match &ending.mix {
                None => None,
                Some([down, up]) => Some([linear(down)?, linear(up)?]),
            },
        })
    }

    /// Bytes that a token reads.
    pub(super) fn bytes(&self) -> usize {
        let mix = self.mix.iter().flatten().map(Linear::bytes);
        size_of::<f32>() * self.norm.len() + mix.sum::<usize>()
    }

    /// Computes what the head reads of rows `x` of the last layer's output, `[rows, hidden]` or
    /// `[rows, streams, hidden]`: `out` `[rows, hidden]`.
    pub(super) fn run(
        &self,
        (cpu, c): (&Cpu, &ModelConfig),
        x: &[f32],
        out: &mut [f32],
    ) -> Result<()> {
        let Some([down, up]) = &self.mix else {
            cpu.rms_norm(x, &self.norm, c.rms_norm_eps, out);
            return Ok(());
        };
        let rows = out.len() / c.hidden_size;
        let mut low = vec![0.0; rows * down.out_features()];
        let [mut normed, mut gates] = [vec![0.0; x.len()], vec![0.0; x.len()]];
        let mix = Mix {
            norm: &self.norm,
            down,
            up,
        };
        let buffers = MixBuffers {
            normed: &mut normed,
            low: &mut low,
            gates: &mut gates,
        };
        mix.run((cpu, c), x, buffers, out, |_, _, _| Ok(()))
    }
}

impl CpuModel {
    /// Looks up `tokens`, all within the vocabulary: `x` `[tokens, hidden]`, or `[tokens, streams, hidden]`, in which all
    /// streams are the same.
    pub(super) fn embed<'a>(
        &self,
        tokens: impl Iterator<Item = &'a u32>,
        x: &mut [f32],
    ) -> Result<()> {
        if self.config.hyper.is_none() {
            return self.look_up(tokens, x);
        }
        let h = self.config.hidden_size;
        for (token, x) in tokens.zip(x.chunks_exact_mut(self.config.stream_width())) {
            let (first, others) = x.split_at_mut(h);
            self.look_up(std::iter::once(token), first)?;
            let others = others.chunks_exact_mut(h);
            others.for_each(|other| other.copy_from_slice(first));
        }
        Ok(())
    }

    /// Looks up `tokens`: `x` `[tokens, hidden]`.
    fn look_up<'a>(&self, tokens: impl Iterator<Item = &'a u32>, x: &mut [f32]) -> Result<()> {
        if let Some(embedding) = &self.embedding {
            return embed(embedding, tokens, x);
        }
        for (&token, x) in tokens.zip(x.chunks_exact_mut(self.config.hidden_size)) {
            self.head.dequantize_row(token as usize, x)?;
        }
        Ok(())
    }
}

/// Looks up `tokens`, all within the vocabulary, in `embedding` `[vocab, hidden]`:
/// `x` `[tokens, hidden]`.
pub(super) fn embed<'a>(
    embedding: &Weight,
    tokens: impl Iterator<Item = &'a u32>,
    x: &mut [f32],
) -> Result<()> {
    let h = embedding.dims().cols;
    for (&token, x) in tokens.zip(x.chunks_exact_mut(h)) {
        embedding.dequantize_row(token as usize, x)?;
    }
    Ok(())
}
