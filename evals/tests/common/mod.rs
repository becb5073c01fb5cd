//! An engine whose logits are a hash of the whole prefix: feeding a window in the wrong order,
//! to the wrong slot or after a stale token gives other logits.

use nq_kernels::rng::Philox;
use nq_model::{ARCHITECTURES, ModelConfig, Rope, RopeScaling};
use nq_runtime::{
    Chunk, Engine, EngineDescription, Error, Logits, Observer, Result, Session, SessionSpec,
};

pub(crate) struct FakeEngine {
    pub(crate) config: ModelConfig,
    description: EngineDescription,
    /// Standard deviation of the noise added to the logits that all fakes share.
    noise: f32,
    /// Puts NaN into the logits after a prefix of this length.
    pub(crate) poison: Option<usize>,
}

impl FakeEngine {
    pub(crate) fn new(vocab: usize, noise: f32) -> Self {
        FakeEngine {
            config: ModelConfig {
                architecture: ARCHITECTURES[0],
                hidden_size: 8,
                intermediate_size: 8,
                experts: None,
                delta: None,
                num_hidden_layers: 1,
                num_attention_heads: 1,
                num_key_value_heads: 1,
                head_dim: 8,
                vocab_size: vocab,
                max_position_embeddings: 64,
                rms_norm_eps: 1e-6,
                rope: Rope {
                    theta: 1e6,
                    dims: None,
                    scaling: RopeScaling::None,
                },
                tie_word_embeddings: true,
                mtp_layers: 0,
                eos_token_ids: vec![0],
                dtype: None,
            },
            description: EngineDescription {
                engine: "fake".into(),
                device: "none".into(),
                ..EngineDescription::default()
            },
            noise,
            poison: None,
        }
    }

    /// Logits after `prefix`.
    pub(crate) fn row(&self, prefix: &[u32]) -> Vec<f32> {
        let stream = prefix.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &t| {
            (h ^ u64::from(t)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut shared = Philox::new(1, stream);
        let mut own = Philox::new(2, stream);
        let mut row: Vec<f32> = (0..self.config.vocab_size)
            .map(|_| 2.0 * shared.normal() + self.noise * own.normal())
            .collect();
        if self.poison == Some(prefix.len()) {
            row[1] = f32::NAN;
        }
        row
    }
}

impl Engine for FakeEngine {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        1
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        Ok(Box::new(FakeSession {
            engine: FakeEngine {
                poison: self.poison,
                ..FakeEngine::new(self.config.vocab_size, self.noise)
            },
            spec,
            slots: vec![Vec::new(); spec.slots],
            logits: Vec::new(),
        }))
    }
}

struct FakeSession {
    engine: FakeEngine,
    spec: SessionSpec,
    slots: Vec<Vec<u32>>,
    logits: Vec<f32>,
}

impl Session for FakeSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.slots[slot].len()
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        self.slots[slot].truncate(len);
        self.slots[slot].len()
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.slots[to] = self.slots[from][..len].to_vec();
        Ok(len)
    }

    fn hidden(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> Result<()> {
        unreachable!("only logits are asked for")
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        _: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        let rows: usize = chunks.iter().map(|c| c.tokens.len()).sum();
        if rows > self.spec.max_rows {
            return Err(Error::Request {
                what: "rows",
                expected: format!("at most {}", self.spec.max_rows),
                found: rows.to_string(),
            });
        }
        self.logits.clear();
        for chunk in chunks {
            assert!(!chunk.tokens.is_empty());
            let wanted = chunk.logits.rows(chunk.tokens.len());
            for (i, &token) in chunk.tokens.iter().enumerate() {
                let held = &mut self.slots[chunk.slot];
                held.push(token);
                if held.len() > self.spec.ctx {
                    return Err(Error::ContextFull {
                        capacity: self.spec.ctx,
                        needed: held.len(),
                    });
                }
                if wanted.contains(&i) {
                    self.logits.extend(self.engine.row(held));
                }
            }
        }
        Ok(Logits {
            data: &self.logits,
            vocab: self.engine.config.vocab_size,
        })
    }
}
