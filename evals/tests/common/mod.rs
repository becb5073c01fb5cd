//! An engine whose logits are a hash of the whole prefix: feeding a window in the wrong order,
//! to the wrong slot or after a stale token gives other logits.

use nq_kernels::rng::Philox;
use nq_model::ModelConfig;
use nq_runtime::{Engine, EngineDescription, Result, Session, SessionSpec};
use nq_testkit::models::{rope, tiny};
use nq_testkit::sessions::FakeSession;

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
                hidden_size: 8,
                intermediate_size: 8,
                num_hidden_layers: 1,
                num_attention_heads: 1,
                num_key_value_heads: 1,
                head_dim: 8,
                vocab_size: vocab,
                max_position_embeddings: 64,
                rope: rope(1e6, None),
                tie_word_embeddings: true,
                eos_token_ids: vec![0],
                ..tiny("qwen3")
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
        let own = FakeEngine {
            poison: self.poison,
            ..FakeEngine::new(self.config.vocab_size, self.noise)
        };
        let vocab = self.config.vocab_size;
        let row = move |prefix: &[u32]| own.row(prefix);
        Ok(Box::new(FakeSession::new(spec, vocab, row)))
    }
}
