//! A model over several GPUs: each, a rank, has a part of every layer (tensor parallelism: Shoeybi et al., Megatron-LM,
//! arXiv 1909.08053), or some of the layers (pipeline parallelism: Huang et al., GPipe, arXiv 1811.06965).
//!
//! A rank is a model and a session like those of one GPU, of a shape with fewer heads and narrower MLPs, or with fewer
//! layers. What blocks of parts add to the residual stream is summed over all ranks on the devices
//! (`kernels::cuda::Collectives`), and stages of layers hand it on, so the stream behind the last layer, the logits and the
//! tokens that are drawn from them are the same on all of them. Every call is made on every
//! rank, each in a thread of its own, because a rank's work ends only with that of the others; what rank 0 returns is
//! the result.

use super::CudaEngine;
use super::division::{choose, refuse, shards};
use super::heat_parts::HeatPart;
use super::part::GpuPart;
use super::served::note_copies;
use super::session::CudaSession;
use crate::{Gpu, Rank};
use nq_formats::{Progress, WeightStore};
use nq_kernels::profile::OpTiming;
use nq_model::ModelConfig;
use nq_runtime::interface::{
    Chunk, DeviceMemory, Drawn, Engine, EngineDescription, ExpertChoices, HeatKeeper, LoadOptions,
    Logits, Observer, Pages, PlacedImage, Run, Session, SessionSpec, Split, StepsAhead,
};
use nq_runtime::sampler::Sampler;
use nq_runtime::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// [`Engine`] on several GPUs.
pub struct ParallelEngine {
    /// Of the whole model.
    config: ModelConfig,
    description: EngineDescription,
    ranks: Vec<CudaEngine>,
    split: Split,
    /// True if the ranks share a GPU.
    beside: bool,
    threads: Arc<rayon::ThreadPool>,
    /// Which of the process's models it is.
    number: usize,
}

/// A session of a model over several GPUs, of which a process has those of one model at a time. Kernels of a rank wait for
/// those of the others: of two models, the ranks on one GPU could wait for the first and those on another for the second,
/// forever.
struct OpenSession;

/// Models so far.
static MODELS: AtomicUsize = AtomicUsize::new(0);
/// The number of the model with open sessions, and how many.
static OPEN: Mutex<(usize, usize)> = Mutex::new((0, 0));

impl OpenSession {
    /// Opens one of model `number`.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if another model has open sessions.
    fn new(number: usize) -> Result<Self> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if open.1 > 0 && open.0 != number {
            return refuse("models at work", "one at a time", "another one");
        }
        *open = (number, open.1 + 1);
        Ok(OpenSession)
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        OPEN.lock().unwrap_or_else(PoisonError::into_inner).1 -= 1;
    }
}

/// Opens the GPUs, each once, which must run the same kernels: what each computes for itself must be the same everywhere.
fn open(ordinals: &[usize]) -> Result<Vec<Gpu>> {
    let mut gpus: Vec<Gpu> = Vec::with_capacity(ordinals.len());
    for (i, ordinal) in ordinals.iter().enumerate() {
        let before = ordinals[..i].iter().position(|o| o == ordinal);
        gpus.push(match before {
            Some(there) => gpus[there].clone(),
            None => Gpu::open(*ordinal)?,
        });
    }
    match gpus.iter().find(|gpu| gpu.code() != gpus[0].code()) {
        Some(other) => refuse(
            "GPUs",
            &format!("GPUs that run the kernels of {}", gpus[0].info()),
            other.info(),
        ),
        None => Ok(gpus),
    }
}

impl ParallelEngine {
    /// Reads a model and packs a part for each of the devices `ordinals`, of which two may be the same: one GPU then stands in
    /// for several.
    pub fn load(
        config: &ModelConfig,
        store: &dyn WeightStore,
        options: &LoadOptions,
        ordinals: &[usize],
        progress: &dyn Progress,
    ) -> Result<Self> {
        let (gpus, ranks) = (open(ordinals)?, ordinals.len());
        let beside = (1..ranks).any(|i| ordinals[..i].contains(&ordinals[i]));
        let mut through_host = false;
        for a in &gpus {
            for b in &gpus {
                through_host |= !a.reach(b)?;
            }
        }
        if through_host {
            progress.note("these GPUs do not reach each other's memory: they exchange values through the computer's");
        }
        let place = |rank| Rank {
            rank,
            ranks,
            through_host,
            beside,
        };
        note_copies(config, progress);
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(ranks)
            .thread_name(|i| format!("rank {i}"))
            .build();
        let threads = threads.map_err(|e| Error::Device {
            device: gpus[0].info().to_string(),
            why: format!("no threads for its ranks: {e}"),
        })?;
        let load_split = |split| -> Result<Vec<CudaEngine>> {
            let free: Vec<usize> = (gpus.iter())
                .map(Gpu::free_memory)
                .collect::<nq_kernels::Result<_>>()?;
            let shards = shards(split, config, &free)?;
            let load = |rank: usize, progress: &dyn Progress| {
                let shard = &shards[rank];
                let (shape, weights) = (shard.config(config)?, shard.store(store, config)?);
                let part = GpuPart {
                    rank: place(rank),
                    split,
                };
                let gpu = gpus[rank].clone();
                CudaEngine::load_on(gpu, Some(part), &shape, &weights, options, progress)
            };
            let mut engines: Vec<Option<Result<CudaEngine>>> = (0..ranks).map(|_| None).collect();
            if beside {
                // The next one's memory is what the one before leaves.
                for (rank, engine) in engines.iter_mut().enumerate() {
                    *engine = Some(load(rank, if rank == 0 { progress } else { &() }));
                }
            } else if let Some((first, others)) = engines.split_first_mut() {
                threads.in_place_scope(|scope| {
                    for (rank, engine) in (1..).zip(others) {
                        let load = &load;
                        scope.spawn(move |_| *engine = Some(load(rank, &())));
                    }
                    *first = Some(load(0, progress));
                });
            }
            engines.into_iter().flatten().collect()
        };
        let mut split = choose(options.split, config, store, &gpus, progress)?;
        let engines = match load_split(split) {
            // Whole layers may have experts in the computer's memory.
            Err(e @ Error::DeviceMemory { .. })
                if split == Split::Tensors
                    && options.split.is_none()
                    && config.experts.is_some() =>
            {
                progress.note(&format!(
                    "each GPU has some of the layers, whose experts may be in the computer's memory, as parts of every layer \
                     do not fit: {e}"
                ));
                split = Split::Layers;
                load_split(split)?
            }
            loaded => loaded?,
        };
        let numbers: Vec<String> = ordinals.iter().map(usize::to_string).collect();
        let one = engines[0].description.clone();
        let info = gpus[0].info();
        Ok(ParallelEngine {
            config: config.clone(),
            description: EngineDescription {
                device: format!(
                    "cuda:{} ({ranks} x {}, sm_{}{}{})",
                    numbers.join(","),
                    info.name,
                    info.capability.major,
                    info.capability.minor,
                    match split {
                        Split::Tensors => "",
                        Split::Layers => ", by layers",
                    }
                ),
                ..one
            },
            ranks: engines,
            split,
            beside,
            threads: Arc::new(threads),
            number: MODELS.fetch_add(1, Ordering::Relaxed),
        })
    }
}

impl Engine for ParallelEngine {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn description(&self) -> &EngineDescription {
        &self.description
    }

    fn bytes_per_token(&self) -> usize {
        self.ranks.iter().map(Engine::bytes_per_token).sum()
    }

    /// Of all GPUs together, if they read at the same time; of layers, which are read one after the other, of their mean.
    fn memory_bandwidth(&self) -> Option<f64> {
        if self.beside {
            return self.ranks[0].memory_bandwidth();
        }
        let each: Option<Vec<f64>> = self.ranks.iter().map(Engine::memory_bandwidth).collect();
        let each = each?;
        let seconds = self
            .ranks
            .iter()
            .zip(&each)
            .map(|(rank, b)| rank.bytes_per_token() as f64 / b);
        Some(match self.split {
            Split::Tensors => each.iter().sum(),
            Split::Layers => self.bytes_per_token() as f64 / seconds.sum::<f64>(),
        })
    }

    fn start_profile(&self) -> bool {
        self.ranks[0].start_profile()
    }

    fn stop_profile(&self) -> Vec<OpTiming> {
        self.ranks[0].stop_profile()
    }

    /// Of all GPUs together. What is free is what activations take, and as much for keys and values as all GPUs would have when
    /// the first one is full.
    fn device_memory(&self, spec: &SessionSpec) -> Option<DeviceMemory> {
        let ranks: Option<Vec<DeviceMemory>> =
            self.ranks.iter().map(|r| r.device_memory(spec)).collect();
        let ranks = ranks?;
        let sum = |part: fn(&DeviceMemory) -> usize| ranks.iter().map(part).sum();
        let (kv, scratch): (usize, usize) = (sum(|r| r.kv), sum(|r| r.scratch));
        let free = if self.beside {
            ranks.iter().map(|r| r.free).min()?
        } else {
            let room = |r: &DeviceMemory| {
                let own = r.free.saturating_sub(r.scratch) as u128;
                own * kv.max(1) as u128 / r.kv.max(1) as u128
            };
            scratch + ranks.iter().map(room).min()? as usize
        };
        Some(DeviceMemory {
            weights: sum(|r| r.weights),
            kv,
            scratch,
            free,
            on_host: false,
        })
    }

    fn expert_choices(&self) -> Option<ExpertChoices> {
        let all = self.ranks.iter().filter_map(Engine::expert_choices);
        all.reduce(|a, b| ExpertChoices {
            layers: [a.layers, b.layers].concat(),
            bus: a.bus.min(b.bus),
        })
    }

    fn keep_heat(&self, keeper: Box<dyn HeatKeeper>) -> Result<()> {
        let experts = |rank: &CudaEngine| {
            let c = rank.config();
            c.num_hidden_layers * c.experts.map_or(0, |e| e.count)
        };
        let parts = HeatPart::of_all(keeper, self.ranks.iter().map(experts));
        let mut ranks = self.ranks.iter().zip(parts);
        ranks.try_for_each(|(rank, part)| rank.keep_heat(Box::new(part)))
    }

    fn sampled_together(&self) -> Option<usize> {
        self.ranks[0].sampled_together()
    }

    fn read_once_from(&self, spec: &SessionSpec, sequences: usize) -> Option<usize> {
        self.ranks[0].read_once_from(spec, sequences)
    }

    fn session(&self, spec: SessionSpec) -> Result<Box<dyn Session>> {
        let open = OpenSession::new(self.number)?;
        let session = |engine: &CudaEngine| engine.open_session(spec);
        let mut ranks: Vec<CudaSession> = self.ranks.iter().map(session).collect::<Result<_>>()?;
        let inboxes: Vec<_> = ranks.iter().filter_map(CudaSession::inbox).collect();
        let blocks = ranks.iter().map(CudaSession::blocks_at_once);
        let blocks: Vec<usize> = blocks.collect::<Result<_>>()?;
        let least = blocks.into_iter().min().unwrap_or(0);
        for rank in &mut ranks {
            rank.join(&inboxes, least)?;
        }
        Ok(Box::new(ParallelSession {
            ranks,
            threads: self.threads.clone(),
            _open: open,
        }))
    }
}

/// A session of all ranks.
struct ParallelSession {
    ranks: Vec<CudaSession>,
    threads: Arc<rayon::ThreadPool>,
    _open: OpenSession,
}

impl ParallelSession {
    fn first(&self) -> &CudaSession {
        &self.ranks[0]
    }

    /// Runs `first` on rank 0 in this thread and `other` on the other ranks, and waits for all of them.
    fn each_with<T>(
        &mut self,
        first: impl FnOnce(&mut CudaSession) -> Result<T>,
        other: impl Fn(&mut CudaSession) -> Result<()> + Sync,
    ) -> Result<T> {
        let Some((rank, others)) = self.ranks.split_first_mut() else {
            unreachable!("there are ranks");
        };
        let mut ended: Vec<Result<()>> = others.iter().map(|_| Ok(())).collect();
        let of_first = self.threads.in_place_scope(|scope| {
            for (rank, end) in others.iter_mut().zip(&mut ended) {
                let other = &other;
                scope.spawn(move |_| *end = other(rank));
            }
            first(rank)
        })?;
        ended.into_iter().collect::<Result<()>>()?;
        self.ranks.iter().try_for_each(CudaSession::check_ranks)?;
        Ok(of_first)
    }

    /// Runs `run` on all ranks; returns the result of rank 0.
    fn each<T>(&mut self, run: impl Fn(&mut CudaSession) -> Result<T> + Sync) -> Result<T> {
        self.each_with(&run, |rank| run(rank).map(drop))
    }

    /// As [`ParallelSession::each`], for what cannot fail.
    fn all<T>(&mut self, run: impl Fn(&mut CudaSession) -> T) -> T {
        let mut results = self.ranks.iter_mut().map(run);
        let Some(first) = results.next() else {
            unreachable!("there are ranks");
        };
        results.for_each(drop);
        first
    }
}

impl Session for ParallelSession {
    fn spec(&self) -> SessionSpec {
        self.first().spec()
    }

    fn len(&self, slot: usize) -> usize {
        self.first().len(slot)
    }

    fn truncate(&mut self, slot: usize, len: usize) -> usize {
        self.all(|rank| rank.truncate(slot, len))
    }

    fn fork(&mut self, from: usize, to: usize, len: usize) -> Result<usize> {
        self.each(|rank| rank.fork(from, to, len))
    }

    fn show(&mut self, slot: usize, images: &[PlacedImage]) -> Result<()> {
        self.each(|rank| rank.show(slot, images))
    }

    fn reach(&self, slot: usize, len: usize) -> usize {
        self.first().reach(slot, len)
    }

    fn keep_at(&mut self, slot: usize, len: usize) {
        self.all(|rank| rank.keep_at(slot, len));
    }

    fn snapshots(&self) -> (usize, usize) {
        self.first().snapshots()
    }

    fn forward(
        &mut self,
        chunks: &[Chunk<'_>],
        observer: Option<&mut dyn Observer>,
    ) -> Result<Logits<'_>> {
        if observer.is_some() {
            return refuse("observers of a forward", "none", "one");
        }
        self.each(|rank| rank.forward(chunks, None).map(drop))?;
        Ok(self.first().logits())
    }

    fn hidden(&mut self, chunks: &[Chunk<'_>], out: &mut Vec<f32>) -> Result<()> {
        self.each_with(
            |rank| rank.hidden(chunks, out),
            |rank| rank.hidden(chunks, &mut Vec::new()),
        )
    }

    fn exact_rows(&self) -> usize {
        self.first().exact_rows()
    }

    fn draft_rows(&self) -> usize {
        self.first().draft_rows()
    }

    fn pages(&mut self) -> Option<&mut dyn Pages> {
        Some(self)
    }

    fn ahead(&mut self) -> Option<&mut dyn StepsAhead> {
        Some(self)
    }
}

/// A page, and states, are those of all ranks, one after the other.
impl Pages for ParallelSession {
    fn free(&self) -> usize {
        self.first().free()
    }

    fn page_bytes(&self) -> usize {
        self.ranks.iter().map(Pages::page_bytes).sum()
    }

    fn state_bytes(&self) -> Option<usize> {
        self.ranks.iter().map(Pages::state_bytes).sum()
    }

    fn read(&mut self, slot: usize, index: usize, out: &mut Vec<u8>) -> Result<()> {
        let mut ranks = self.ranks.iter_mut();
        ranks.try_for_each(|rank| rank.read(slot, index, out))
    }

    fn append(&mut self, slot: usize, page: &[u8]) -> Result<()> {
        nq_runtime::checks::check_bytes("a page of keys and values", page, self.page_bytes())?;
        let mut rest = page;
        self.ranks.iter_mut().try_for_each(|rank| {
            let (part, behind) = rest.split_at(rank.page_bytes());
            rest = behind;
            rank.append(slot, part)
        })
    }

    fn read_state(&mut self, slot: usize, len: usize, out: &mut Vec<u8>) -> Result<()> {
        let mut ranks = self.ranks.iter_mut();
        ranks.try_for_each(|rank| rank.read_state(slot, len, out))
    }

    fn write_state(&mut self, slot: usize, state: &[u8]) -> Result<()> {
        let all = self.state_bytes().unwrap_or(0);
        if all == 0 {
            return Ok(());
        }
        nq_runtime::checks::check_bytes("states of a sequence", state, all)?;
        let mut rest = state;
        self.ranks.iter_mut().try_for_each(|rank| {
            let (part, behind) = rest.split_at(rank.state_bytes().unwrap_or(0));
            rest = behind;
            rank.write_state(slot, part)
        })
    }
}

impl StepsAhead for ParallelSession {
    fn rows(&self) -> usize {
        self.first().rows()
    }

    fn depth(&self) -> usize {
        self.first().depth()
    }

    fn check(&self, tokens: &[u32], sampler: Option<&Sampler>) -> Result<()> {
        self.first().check(tokens, sampler)
    }

    fn queue_prompts(&mut self, chunks: &[Chunk<'_>]) -> Result<()> {
        self.each(|rank| rank.queue_prompts(chunks))
    }

    fn finish_prompts(&mut self) -> Result<Duration> {
        self.each(StepsAhead::finish_prompts)
    }

    fn seat(&mut self, row: usize, slot: usize, token: u32, sampler: &Sampler) -> Result<()> {
        self.each(|rank| rank.seat(row, slot, token, sampler))
    }

    fn vacate(&mut self, row: usize) -> Result<()> {
        self.each(|rank| rank.vacate(row))
    }

    fn queue(&mut self) -> Result<()> {
        self.each(StepsAhead::queue)
    }

    fn queue_runs(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self.each(|rank| rank.queue_runs(runs))
    }

    fn receive(&mut self, each: &mut dyn FnMut(usize, Result<Drawn>)) -> Result<()> {
        let token = |drawn: &Result<Drawn>| drawn.as_ref().ok().map(|d| d.token);
        let mut drawn = Vec::new();
        for rank in &mut self.ranks {
            let mut of_rank = Vec::new();
            rank.receive(&mut |row, found| of_rank.push((row, found)))?;
            if drawn.is_empty() {
                drawn = of_rank;
            } else if !(drawn.iter().map(|d| token(&d.1))).eq(of_rank.iter().map(|d| token(&d.1))) {
                return Err(Error::Kernel(nq_kernels::Error::Cuda {
                    what: "decoding on several GPUs",
                    why: "they drew different tokens".into(),
                }));
            }
        }
        self.ranks.iter().try_for_each(CudaSession::check_ranks)?;
        drawn.into_iter().for_each(|(row, found)| each(row, found));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_model_at_a_time_has_open_sessions() {
        let first = OpenSession::new(1).unwrap();
        let second = OpenSession::new(1).unwrap();
        drop(first);
        let error = OpenSession::new(2).err().expect("refused").to_string();
        assert!(error.contains("one at a time"), "{error}");
        drop(second);
        drop(OpenSession::new(2).unwrap());
    }
}
