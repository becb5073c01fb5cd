//! An EAGLE-3 head on the CPU.

use super::layer::pack;
use super::session::embed;
use crate::error::{Error, Result};
use crate::load::LoadOptions;
use crate::models;
use crate::rope::Rotary;
use crate::sampler::best_token;
use crate::weights::Census;
use nq_formats::eagle::{EagleConfig, EagleHead, TAPS};
use nq_formats::names::HEAD;
use nq_formats::{ModelConfig, Weight, WeightStore};
use nq_kernels::cpu::{Cpu, Epilogue, KvPages, KvSequence, Linear, PAGE, Span};

/// Rows computed together.
const ROWS: usize = 256;

/// A head packed for this CPU.
pub(crate) struct EagleModel {
    pub(crate) config: EagleConfig,
    cpu: Cpu,
    rotary: Rotary,
    embedding: Weight, // [vocab, hidden]
    fc: Linear,        // [hidden, 3 hidden]
    token_norm: Vec<f32>,
    hidden_norm: Vec<f32>,
    qkv: Linear, // [q_dim + 2 kv_dim, 2 hidden]
    o: Linear,
    mlp_norm: Vec<f32>,
    gate_up: Linear,
    down: Linear,
    norm: Vec<f32>,
    head: Linear, // [draft vocab, hidden]
    /// The model's token for each of the head's.
    tokens: Vec<u32>,
}

impl EagleModel {
    /// Packs `head` for the model `target`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; a model that the head was not made for.
    pub(crate) fn load(
        head: &EagleHead,
        (model, target): (&ModelConfig, &dyn WeightStore),
        options: &LoadOptions,
    ) -> Result<Self> {
        head.check_model(model)?;
        let (cpu, c, store) = (options.cpu()?, &head.config, head.store.as_ref());
        let (h, d) = (c.hidden_size, c.head_dim);
        let (q, kv) = (c.num_attention_heads * d, c.num_key_value_heads * d);
        let mut census = Census::default();
        let mut linear =
            |product: &'static str, parts: &[(&str, usize, usize)]| -> Result<Linear> {
                let read = |&(part, out, inputs): &(&str, usize, usize)| {
                    store.matrix(&head.name(part), (out, inputs))
                };
                let weights: Vec<Weight> = parts.iter().map(read).collect::<Result<_, _>>()?;
                let parts: Vec<&Weight> = weights.iter().collect();
                pack(&cpu, options, (product, 1), &parts, &mut census)
            };
        let fc = linear("fc", &[("fc", h, TAPS * h)])?;
        let qkv = linear(
            "qkv",
            &[
                (".self_attn.q_proj", q, 2 * h),
                (".self_attn.k_proj", kv, 2 * h),
                (".self_attn.v_proj", kv, 2 * h),
            ],
        )?;
        let o = linear("o", &[(".self_attn.o_proj", h, q)])?;
        let width = c.intermediate_size;
        let gate_up = linear(
            "gate_up",
            &[(".mlp.gate_proj", width, h), (".mlp.up_proj", width, h)],
        )?;
        let down = linear("down", &[(".mlp.down_proj", h, width)])?;
        let drafted = linear("draft head", &[(HEAD, c.draft_vocab_size, h)])?;
        let norm =
            |part: &str| -> Result<Vec<f32>> { Ok(store.vector(&head.name(part), h)?.to_f32()?) };
        let shape = ModelConfig {
            head_dim: d,
            rope: c.rope,
            ..model.clone()
        };
        Ok(EagleModel {
            token_norm: norm(".input_layernorm")?,
            hidden_norm: norm(".hidden_norm")?,
            mlp_norm: norm(".post_attention_layernorm")?,
            norm: norm("norm")?,
            embedding: match head.has_embedding {
                true => models::embedding(store, model)?,
                false => models::embedding(target, model)?,
            },
            rotary: Rotary::new(&shape),
            config: c.clone(),
            tokens: head.tokens.clone(),
            head: drafted,
            cpu,
            fc,
            qkv,
            o,
            gate_up,
            down,
        })
    }

    /// An empty cache of `pages` pages.
    pub(crate) fn cache(&self, pages: usize) -> KvPages {
        let c = &self.config;
        KvPages::new(Default::default(), pages, c.num_key_value_heads, c.head_dim)
    }

    /// Feeds `tokens`, each with what the model made of the token before it: `streams` `[rows, 3 hidden]`. The
    /// first stands at `position` of the sequence that `table` lists. Returns the stream after the last one.
    pub(crate) fn feed(
        &self,
        (cache, table): (&mut KvPages, &[u32]),
        position: usize,
        tokens: &[u32],
        streams: &[f32],
    ) -> Result<Vec<f32>> {
        let h = self.config.hidden_size;
        let mut last = Vec::new();
        let rows = tokens.chunks(ROWS).zip(streams.chunks(ROWS * TAPS * h));
        for (i, (tokens, streams)) in rows.enumerate() {
            let mut x = vec![0.0; tokens.len() * h];
            self.cpu
                .linear(&self.fc, streams, &mut x, Epilogue::Store)?;
            self.layer((cache, table), position + i * ROWS, tokens, &mut x)?;
            last = x[x.len() - h..].to_vec();
        }
        Ok(last)
    }

    /// Feeds the drafted `token`; `x` `[hidden]` is the stream after the token before it, and becomes that after
    /// this one.
    pub(crate) fn feed_draft(
        &self,
        cache: (&mut KvPages, &[u32]),
        position: usize,
        token: u32,
        x: &mut [f32],
    ) -> Result<()> {
        self.layer(cache, position, &[token], x)
    }

    /// The likeliest token after the stream `x` `[hidden]`.
    pub(crate) fn draft(&self, x: &[f32]) -> Result<u32> {
        let mut normed = vec![0.0; x.len()];
        (self.cpu).rms_norm(x, &self.norm, self.config.rms_norm_eps, &mut normed);
        let mut logits = vec![0.0; self.config.draft_vocab_size];
        (self.cpu).linear(&self.head, &normed, &mut logits, Epilogue::Store)?;
        Ok(self.tokens[best_token(&logits)? as usize])
    }

    /// The layer over rows of one sequence: `x` `[rows, hidden]` is its input and becomes its output.
    fn layer(
        &self,
        (cache, table): (&mut KvPages, &[u32]),
        position: usize,
        tokens: &[u32],
        x: &mut [f32],
    ) -> Result<()> {
        let (cpu, c, m) = (&self.cpu, &self.config, tokens.len());
        let (h, d, eps) = (c.hidden_size, c.head_dim, c.rms_norm_eps);
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        let (q_dim, kv_dim) = (heads * d, kv_heads * d);
        let stride = q_dim + 2 * kv_dim;

        let (mut rows, mut normed) = (vec![0.0; m * h], vec![0.0; m * h]);
        let mut both = vec![0.0; m * 2 * h];
        let mut place = |normed: &[f32], half: usize| {
            let pairs = both.chunks_exact_mut(2 * h).zip(normed.chunks_exact(h));
            pairs.for_each(|(to, from)| to[half * h..][..h].copy_from_slice(from));
        };
        embed(&self.embedding, tokens.iter(), &mut rows)?;
        cpu.rms_norm(&rows, &self.token_norm, eps, &mut normed);
        place(&normed, 0);
        cpu.rms_norm(x, &self.hidden_norm, eps, &mut normed);
        place(&normed, 1);
        if c.norm_before_residual {
            x.copy_from_slice(&normed);
        }

        let mut qkv = vec![0.0; m * stride];
        cpu.linear(&self.qkv, &both, &mut qkv, Epilogue::Store)?;
        let mut angles = vec![(0.0, 0.0); d / 2];
        for (r, row) in qkv.chunks_exact_mut(stride).enumerate() {
            self.rotary.row(position + r, &mut angles);
            let (rotated, values) = row.split_at_mut(q_dim + kv_dim);
            rotated
                .chunks_exact_mut(d)
                .for_each(|head| rotate(head, &angles));
            let at = position + r;
            cache.store(table[at / PAGE], at % PAGE, &rotated[q_dim..], values);
        }
        let mut attended = vec![0.0; m * q_dim];
        let span = Span {
            row: 0,
            len: m,
            position,
        };
        let cache = &*cache;
        let sequence = |_: usize| KvSequence::new(cache, table);
        cpu.attention_batch(&qkv, stride, &[span], heads, d, sequence, &mut attended);
        cpu.linear(&self.o, &attended, x, Epilogue::Add)?;

        cpu.rms_norm(x, &self.mlp_norm, eps, &mut normed);
        let mut gated = vec![0.0; m * c.intermediate_size];
        cpu.linear(&self.gate_up, &normed, &mut gated, Epilogue::SiluMul)?;
        cpu.linear(&self.down, &gated, x, Epilogue::Add)?;
        match crate::engine::all_finite(x) {
            true => Ok(()),
            false => Err(Error::NotFinite {
                what: "the EAGLE-3 head behind the output",
                layer: 0,
            }),
        }
    }
}

/// Rotates a head by the angles of its position, halves as pairs.
fn rotate(head: &mut [f32], angles: &[(f32, f32)]) {
    let (first, second) = head.split_at_mut(angles.len());
    for ((a, b), &(cos, sin)) in first.iter_mut().zip(second).zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}
