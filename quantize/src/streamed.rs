//! A model as an engine on a device that has no room for the whole of it: it is run layer by layer
//! over texts known beforehand. The last layer's output is kept on the host, and the head stays on
//! the device.

use crate::error::Result;
use crate::layers::RowProgress;
use nq_formats::{Progress, Unit, Weight, WeightStore};
use nq_model::ModelConfig;
use nq_runtime::models::{self, Ending};
use nq_runtime::{
    Chunk, Engine, EngineDescription, Error as RuntimeError, Head, Hidden, LayerStepper,
    LayerWeights, Logits, Observer, Session, SessionSpec,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Rows whose logits are computed at once.
pub(crate) const ROWS: usize = 64;

/// An [`Engine`] for texts that were known when it was made: it computes logits of them alone.
pub struct Streamed {
    inner: Arc<Inner>,
    description: EngineDescription,
}

struct Inner {
    config: ModelConfig,
    texts: Vec<Vec<u32>>,
    hidden: Vec<f32>, // [tokens of all texts, hidden], or with streams between, after the last layer
    head: Mutex<Box<dyn Head>>,
}

impl Streamed {
    /// Runs `store`'s layers over `texts` with `stepper`, whose memory is given back before the
    /// head takes its own. What they put out, `4 * hidden size` bytes a token, stays in the host's memory.
    ///
    /// # Errors
    /// Errors of reading or running the layers.
    pub fn new(
        mut stepper: Box<dyn LayerStepper>,
        store: &dyn WeightStore,
        texts: &[Vec<u32>],
        progress: &dyn Progress,
    ) -> Result<Self> {
        let config = stepper.config().clone();
        let embedding = models::embedding(store, &config)?;
        let mut stream = Hidden::embed(&embedding, texts, config.streams())?;
        let tokens: usize = stream.lengths.iter().sum();
        let layers = config.num_hidden_layers;
        let total = (tokens * layers) as u64;
        progress.begin("running the source layer by layer", total, Unit::Tokens);
        for index in 0..layers {
            let weights = LayerWeights::read(store, &config, index)?;
            let mut pass = RowProgress {
                width: config.stream_width(),
                progress,
            };
            stepper.layer(index, &weights, &mut stream, &mut pass)?;
            weights.linears.values().for_each(Weight::release);
        }
        progress.end();
        let head = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            models::head(store, &config)?
        };
        let ending = Ending::read(store, &config)?;
        let opened = stepper.open_head(&ending, &head, ROWS)?;
        embedding.release();
        Ok(Streamed {
            description: EngineDescription {
                engine: "nq, layer by layer".into(),
                device: stepper.device(),
                kernels: "f32".into(),
                activations: "f32".into(),
                bits: 16,
                threads: 0,
            },
            inner: Arc::new(Inner {
                config,
                texts: texts.to_vec(),
                hidden: stream.data,
                head: Mutex::new(opened),
            }),
        })
    }
}

impl Engine for Streamed {
    fn config(&self) -> &ModelConfig {
        &self.inner.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        let c = &self.inner.config;
        4 * (c.trunk_parameters()
            - usize::from(!c.tie_word_embeddings) * c.vocab_size * c.hidden_size)
    }

    fn session(&self, spec: SessionSpec) -> nq_runtime::Result<Box<dyn Session>> {
        Ok(Box::new(StreamedSession {
            spec,
            fed: vec![Vec::new(); spec.slots],
            host: Vec::new(),
            inner: Arc::clone(&self.inner),
        }))
    }
}

struct StreamedSession {
    inner: Arc<Inner>,
    spec: SessionSpec,
    fed: Vec<Vec<u32>>, // by slot
    host: Vec<f32>,
}

impl StreamedSession {
    /// Where in the stream the text that begins with `tokens` starts.
    fn start(&self, tokens: &[u32]) -> nq_runtime::Result<usize> {
        let mut start = 0;
        for text in &self.inner.texts {
            if text.starts_with(tokens) {
                return Ok(start);
            }
            start += text.len();
        }
        Err(RuntimeError::Request {
            what: "text",
            expected: "a text that the source was run over".into(),
            found: format!("another one of {} tokens", tokens.len()),
        })
    }

    /// Appends the logits of `rows` of the stream to those on the host.
    fn push_logits(&mut self, rows: std::ops::Range<usize>) -> nq_runtime::Result<()> {
        let h = self.inner.config.stream_width();
        let mut head = (self.inner.head.lock()).unwrap_or_else(PoisonError::into_inner);
        let hidden = &self.inner.hidden[rows.start * h..rows.end * h];
        for rows in hidden.chunks(ROWS * h) {
            self.host.extend_from_slice(head.logits(rows)?);
        }
        Ok(())
    }
}

impl Session for StreamedSession {
    fn spec(&self) -> SessionSpec {
        self.spec
    }

    fn len(&self, slot: usize) -> usize {
        self.fed[slot].len()
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        self.fed[slot].truncate(len);
        self.fed[slot].len()
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> nq_runtime::Result<usize> {
        self.fed[to] = self.fed[from][..len].to_vec();
        Ok(len)
    }

    fn hidden(&mut self, _: &[Chunk<'_>], _: &mut Vec<f32>) -> nq_runtime::Result<()> {
        Err(nq_runtime::Error::Unsupported {
            engine: "a source run layer by layer",
            what: "output",
            expected: "logits".into(),
            found: "hidden states".into(),
        })
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        _observer: Option<&mut dyn Observer>,
    ) -> nq_runtime::Result<Logits<'_>> {
        self.host.clear();
        for chunk in chunks {
            let from = self.fed[chunk.slot].len();
            self.fed[chunk.slot].extend_from_slice(chunk.tokens);
            let wanted = chunk.logits.rows(chunk.tokens.len());
            let start = from + self.start(&self.fed[chunk.slot])?;
            self.push_logits(start + wanted.start..start + wanted.end)?;
        }
        Ok(Logits {
            data: &self.host,
            vocab: self.inner.config.vocab_size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nq_evals::{EvalSpec, Protocol, compare};
    use nq_formats::Checkpoint;
    use nq_load::{load, stepper};
    use nq_runtime::{ActivationChoice, DeviceChoice, KvType, LoadOptions};
    use std::path::Path;

    /// It gives the same distributions as the engine that holds the whole model.
    #[test]
    fn it_is_the_source_over_its_text() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo");
        let checkpoint = Checkpoint::open(&root).unwrap();
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let ids: Vec<u32> = (0..100).map(|i| (i * 37 + 11) % 4000).collect();
        let texts: Vec<Vec<u32>> = ids.chunks(50).map(<[u32]>::to_vec).collect();
        let options = LoadOptions {
            device: DeviceChoice::Cpu,
            activations: ActivationChoice::F32,
            ..LoadOptions::default()
        };
        let stepper = stepper(config, &options, KvType::F32, usize::MAX).unwrap();
        let streamed = Streamed::new(stepper, store, &texts, &()).unwrap();
        let whole = load(config, store, &options, &()).unwrap();
        let spec = EvalSpec::new(Protocol::Llama, 50, "a test");
        let found = compare(whole.as_ref(), &streamed, &ids, &spec, &()).unwrap();
        let kld = found.report.against.unwrap().kld;
        assert!(kld.max < 1e-5, "{kld:?}");

        let spec = EvalSpec::new(Protocol::Llama, 40, "a test");
        let error = compare(whole.as_ref(), &streamed, &ids, &spec, &()).unwrap_err();
        assert!(
            error.to_string().contains("the source was run over"),
            "{error}"
        );
    }
}
