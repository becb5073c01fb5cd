//! Which experts of a model in banks have rooms on the GPU. Kernels count which experts rows choose; between steps the
//! host reads the counts, and gives rooms of experts that are chosen less to some that are chosen more.
//!
//! Everything is in the order of the session's stream: an expert that leaves is read in the bank before its room is
//! filled, on a stream of copies, and one that comes is read in its room after that, so no step ever sees a room
//! change. What kernels compute does not depend on any of this.

mod policy;

use super::host_experts::HostExperts;
use super::layer::HeldLayer;
use super::model::stack;
use super::weights::{BankShape, expert_table};
use crate::bank::{CountsRead, ExpertPlace, ExpertTable, Half, LayerBank, StageSizes, TableWriter};
use crate::{DeviceLinear, Gpu, GroupedRows, Mark, Stream, StreamOptions, Uploader};
use nq_formats::{Weight, human_bytes};
use nq_model::ModelConfig;
use nq_runtime::interface::HeatKeeper;
use nq_runtime::models::LayerWeights;
use nq_runtime::weights::Kinds;
use nq_runtime::{Error, Result};
use policy::Heat;
use std::borrow::Cow;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Routes of rows for each expert of a layer from which on all experts of the next one are brought to prompts before it
/// is known which ones it needs: in texts, fewer rows leave a part of them out.
const ROUTES_OF_ALL: usize = 64;

/// Most experts of a layer that move at once, and of all layers: what they take of the bus, steps lack.
const MOST_OF_LAYER: usize = 2;
const MOST_AT_ONCE: usize = 24;

/// The banks of a model's layers.
pub(super) struct ModelBank {
    table: ExpertTable,
    layers: Vec<Option<Arc<LayerBank>>>,
    /// Before the weights are packed.
    empty: Vec<Option<(BankShape, LayerBank)>>,
    stage: StageSizes,
    rooms: usize,
    /// Experts of a layer that routers choose for a token.
    per_token: usize,
    /// Experts of a layer that routers choose among.
    routed: usize,
    /// Keeps the heat of experts for the next run.
    keeper: OnceLock<Box<dyn HeatKeeper>>,
    residency: Mutex<Residency>,
    /// Copies of experts for layers that prompts come to next.
    ahead: Stream,
    /// A share for each session.
    sessions: Arc<()>,
}

/// What is in which room, and what moves.
struct Residency {
    /// [layers, experts of the table]
    places: Vec<ExpertPlace>,
    /// By layer: the expert of each room, and of one that is being filled the expert to come.
    rooms: Vec<Vec<usize>>,
    heat: Heat,
    /// The latest counts.
    counts: Vec<u32>,
    reading: CountsRead,
    writer: TableWriter,
    copies: Stream,
    moving: Vec<Move>,
    /// Behind the copies of those that are moving.
    moved: Option<Mark>,
}

/// Experts of a layer on their way to the stage of a session.
pub(super) struct Coming {
    layer: usize,
    end: Mark,
}

#[derive(Clone, Copy)]
struct Move {
    layer: usize,
    expert: usize,
    room: usize,
}

impl ModelBank {
    /// Locks the memory of all banks, and allocates rooms and table, before anything is packed. So many models do so at
    /// once, each with about as many layers: those of several GPUs.
    ///
    /// # Errors
    /// [`Error::Memory`] if the computer has too little; [`nq_kernels::Error::DeviceMemory`], also if the system does not
    /// lock so much; a weight that no kernel serves.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        kinds: Kinds<'_>,
        rooms: usize,
        stage: StageSizes,
        at_once: usize,
    ) -> Result<Self> {
        let shapes = (0..c.num_hidden_layers).map(|index| {
            let spec = c.layer(index);
            let held = HeldLayer::new(c, spec, false, |kind| kinds(&spec.linear(kind).name(index)));
            BankShape::of(c, kinds, index, &held)
        });
        let shapes = shapes.collect::<Result<Vec<_>>>()?;
        // The system would end the process that locks more than there is.
        let bytes: usize = shapes.iter().flatten().map(BankShape::bytes).sum();
        HostExperts::check_memory(bytes * at_once)?;
        let table = expert_table(gpu, c)?;
        let mut empty = Vec::with_capacity(shapes.len());
        for (index, shape) in shapes.into_iter().enumerate() {
            let bank = shape.map(|shape| {
                let (experts, shapes) = (shape.experts, shape.shapes);
                let bank = LayerBank::new(gpu, &table, index, experts, shapes, rooms)?;
                Ok::<_, Error>((shape, bank))
            });
            empty.push(bank.transpose()?);
        }
        let experts = table.counts().len() / c.num_hidden_layers.max(1);
        let residency = Residency {
            places: vec![ExpertPlace::Bank; table.counts().len()],
            rooms: vec![(0..rooms).collect(); c.num_hidden_layers],
            heat: Heat::new(c.num_hidden_layers, experts),
            counts: vec![0; table.counts().len()],
            reading: CountsRead::new(gpu, &table)?,
            writer: TableWriter::new(gpu, &table)?,
            copies: gpu.stream_with(StreamOptions::default())?,
            moving: Vec::new(),
            moved: None,
        };
        Ok(ModelBank {
            layers: Vec::new(),
            empty,
            stage,
            rooms,
            per_token: c.experts.map_or(0, |e| e.per_token),
            routed: c.experts.map_or(0, |e| e.count),
            keeper: OnceLock::new(),
            residency: Mutex::new(residency),
            ahead: gpu.stream_with(StreamOptions {
                last: true,
                ..StreamOptions::default()
            })?,
            sessions: Arc::new(()),
            table,
        })
    }

    /// Packs the experts of the next layer, `index`, and fills its rooms with the first ones, or the shared one and the
    /// first ones. Returns both halves; `None` for a layer without experts.
    ///
    /// # Errors
    /// Errors of [`LayerBank::pack`](crate::bank::LayerBank); errors of the driver.
    pub(super) fn pack(
        &mut self,
        uploader: &mut Uploader,
        weights: &LayerWeights,
        held: &HeldLayer,
        (index, plain): (usize, bool),
    ) -> Result<Option<[DeviceLinear; 2]>> {
        let found = self.empty.get_mut(index).and_then(Option::take);
        let (Some((shape, mut bank)), Some((_, spec))) = (found, weights.spec.experts()) else {
            self.layers.push(None);
            return Ok(None);
        };
        let mut scales = [1.0; 2];
        for (half, product) in [(Half::Up, &spec.gate_up), (Half::Down, &spec.down)] {
            let parts = held.parts(product).into_iter();
            let parts = parts.map(|part| part.weight(weights));
            let parts = parts.collect::<Result<Vec<Cow<'_, Weight>>>>()?;
            let parts: Vec<&Weight> = parts.iter().map(|part| &**part).collect();
            let plain = plain || held.is_plain(product);
            scales[half as usize] = bank.pack(half, &parts, stack(product), plain)?;
        }
        let bank = Arc::new(bank);
        let residency = &mut *lock(&self.residency);
        // A shared expert is the last, and every row goes through it.
        let experts = if held.has_shared() {
            residency.heat.keep(index, bank.experts() - 1);
            let first = std::iter::once(bank.experts() - 1).chain(0..bank.experts() - 1);
            first.take(self.rooms).collect()
        } else {
            (0..self.rooms).collect::<Vec<usize>>()
        };
        let each = residency.places.len() / residency.rooms.len();
        for (room, &expert) in experts.iter().enumerate() {
            bank.move_in(uploader.stream(), expert, room)?;
            residency.places[index * each + expert] = ExpertPlace::Room(room);
        }
        residency.rooms[index] = experts;
        self.layers.push(Some(Arc::clone(&bank)));
        if self.layers.len() == self.empty.len() {
            let (table, layers) = (&self.table, &self.layers);
            (residency.writer).write(uploader.stream(), table, layers, &residency.places)?;
        }
        Ok(Some(shape.halves(&bank, scales)))
    }

    /// Gives the rooms to the experts that `keeper` says texts chose in earlier runs, before there is a session, and lets
    /// it keep their heat in the end.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn keep_heat(&self, keeper: Box<dyn HeatKeeper>) -> Result<()> {
        let kept = keeper.kept(self.layers.len() * self.routed);
        let keeper = self.keeper.set(keeper);
        let (Some(kept), Ok(()), 1) = (kept, keeper, Arc::strong_count(&self.sessions)) else {
            return Ok(());
        };
        let residency = &mut *lock(&self.residency);
        residency.heat.restore(&kept, self.routed);
        let each = residency.places.len() / residency.rooms.len();
        for (layer, bank) in self.layers.iter().enumerate() {
            let Some(bank) = bank else { continue };
            let (rooms, experts) = (&mut residency.rooms[layer], bank.experts());
            let wanted = residency.heat.hottest(layer, experts, rooms.len());
            let places = &mut residency.places[layer * each..][..experts];
            let absent = |&e: &usize| places[e] == ExpertPlace::Bank;
            let coming: Vec<usize> = wanted.iter().copied().filter(absent).collect();
            let leaves = |&room: &usize| !wanted.contains(&rooms[room]);
            let leaving: Vec<usize> = (0..rooms.len()).filter(leaves).collect();
            for (room, expert) in leaving.into_iter().zip(coming) {
                bank.move_in(&residency.copies, expert, room)?;
                places[std::mem::replace(&mut rooms[room], expert)] = ExpertPlace::Bank;
                places[expert] = ExpertPlace::Room(room);
            }
        }
        let (writer, copies) = (&mut residency.writer, &residency.copies);
        writer.write(copies, &self.table, &self.layers, &residency.places)?;
        Ok(copies.synchronize()?)
    }

    /// The stacks that sessions make of experts.
    pub(super) fn stage(&self) -> StageSizes {
        self.stage
    }

    /// Brings the experts of layer `index` to where products of the `rows` of a prompt read them, unless `coming` says
    /// that they are on their way there; beside the products of many rows, those of the next layer, too. Returns what is
    /// on its way then.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn bring(
        &self,
        stream: &Stream,
        index: usize,
        rows: &mut GroupedRows,
        coming: Option<Coming>,
    ) -> nq_kernels::Result<Option<Coming>> {
        let Some(bank) = self.layers.get(index).and_then(Option::as_deref) else {
            return Ok(None);
        };
        match coming {
            Some(coming) if coming.layer == index => {
                stream.wait_for(&coming.end)?;
                rows.turn();
            }
            _ => stream.stage_experts(bank, rows)?,
        }
        let mut later = self.layers.iter().enumerate().skip(index + 1);
        let next = later.find_map(|(layer, bank)| Some((layer, bank.as_deref()?)));
        let wanted = |next: &LayerBank| rows.routes() >= ROUTES_OF_ALL * next.experts();
        let Some((layer, next)) = next.filter(|(_, next)| wanted(next)) else {
            return Ok(None);
        };
        // The products that read the other stacks are before this in the stream.
        self.ahead.wait_for(&stream.mark()?)?;
        self.ahead.stage_next(next, rows)?;
        let end = self.ahead.mark()?;
        Ok(Some(Coming { layer, end }))
    }

    /// Waits for experts that were on their way for a pass that failed. If the driver fails, later work does, too.
    pub(super) fn settle(&self) {
        let _ = self.ahead.synchronize();
    }

    /// A new session's share. Experts move only while there is a single session, whose stream orders what reads them.
    ///
    /// # Errors
    /// The first error of copies that were on their way.
    pub(super) fn join(&self) -> Result<Arc<()>> {
        let share = Arc::clone(&self.sessions);
        let residency = lock(&self.residency);
        if let Some(moved) = &residency.moved {
            moved.wait()?;
        }
        Ok(share)
    }

    /// To be called behind each step or prompt that was queued in the `stream` of a session: takes the counts that
    /// have come, and lets experts move. Never waits.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn adapt(&self, stream: &Stream) -> Result<()> {
        if Arc::strong_count(&self.sessions) > 2 {
            return Ok(());
        }
        let residency = &mut *lock(&self.residency);
        let arrived = residency.arrive()?;
        let leaving = residency.choose(&self.layers)?;
        if arrived || leaving {
            let (table, layers) = (&self.table, &self.layers);
            (residency.writer).write(stream, table, layers, &residency.places)?;
        }
        if leaving {
            residency.copies.wait_for(&stream.mark()?)?;
            for m in &residency.moving {
                if let Some(bank) = &self.layers[m.layer] {
                    bank.move_in(&residency.copies, m.expert, m.room)?;
                }
            }
            residency.moved = Some(residency.copies.mark()?);
        }
        if !residency.reading.is_queued() {
            residency.reading.queue(stream, &self.table)?;
        }
        Ok(())
    }

    /// How many choices of experts found them in rooms so far, and how many there were.
    pub(super) fn hits(&self) -> (u64, u64) {
        lock(&self.residency).heat.hits()
    }
}

impl Drop for ModelBank {
    fn drop(&mut self) {
        let residency = lock(&self.residency);
        if let (Some(keeper), (_, 1..)) = (self.keeper.get(), residency.heat.hits()) {
            keeper.keep(&residency.heat.values(self.routed));
        }
    }
}

impl Residency {
    /// Lets kernels read the experts whose copies are done in their rooms; false if there are none.
    fn arrive(&mut self) -> Result<bool> {
        match &self.moved {
            Some(moved) if moved.has_passed()? => {}
            _ => return Ok(false),
        }
        self.moved = None;
        let each = self.places.len() / self.rooms.len();
        for m in self.moving.drain(..) {
            self.places[m.layer * each + m.expert] = ExpertPlace::Room(m.room);
        }
        Ok(true)
    }

    /// Takes the counts if they have come and, unless others still move, chooses experts that move, whose rooms nobody
    /// shall read from then on; false if there are none.
    fn choose(&mut self, layers: &[Option<Arc<LayerBank>>]) -> Result<bool> {
        let Some(counts) = self.reading.take()? else {
            return Ok(false);
        };
        let each = self.places.len() / self.rooms.len();
        let in_room = |i: usize| matches!(self.places[i], ExpertPlace::Room(_));
        self.heat.take(counts, &mut self.counts, in_room);
        if self.moved.is_some() {
            return Ok(false);
        }
        let mut wanted = Vec::new();
        for (layer, bank) in layers.iter().enumerate() {
            let Some(bank) = bank else { continue };
            let rooms = &self.rooms[layer];
            wanted.extend(self.heat.swaps(layer, bank.experts(), rooms, MOST_OF_LAYER));
        }
        // The hottest of all layers first.
        wanted.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        wanted.truncate(MOST_AT_ONCE);
        for swap in &wanted {
            let leaves = std::mem::replace(&mut self.rooms[swap.layer][swap.room], swap.expert);
            self.places[swap.layer * each + leaves] = ExpertPlace::Bank;
            self.moving.push(Move {
                layer: swap.layer,
                expert: swap.expert,
                room: swap.room,
            });
        }
        Ok(!wanted.is_empty())
    }
}

fn lock(residency: &Mutex<Residency>) -> MutexGuard<'_, Residency> {
    residency.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ModelBank {
    /// Where experts are, and what that allows, for the user.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn told(&self, gpu: &Gpu) -> Result<String> {
        let banks = || self.layers.iter().flatten();
        let bytes = |count: &dyn Fn(&LayerBank) -> usize| -> usize {
            banks().map(|b| b.expert_bytes() * count(b)).sum()
        };
        let mut told = format!(
            "{} of {} experts of each layer ({}) are on the GPU; all ({}) are in page-locked memory, where it reads the others",
            self.rooms,
            banks().map(|b| b.experts()).max().unwrap_or(0),
            human_bytes(bytes(&|b| b.rooms()) as u64),
            human_bytes(bytes(&|b| b.experts()) as u64),
        );
        let (rate, token) = (gpu.copy_bandwidth()?, bytes(&|_| self.per_token) as f64);
        told += &format!(
            " at {:.0} GB/s: at most {:.0} tokens a second where a text finds none of its experts on the GPU, {:.0} where it \
             finds 9 of 10",
            rate / 1e9,
            rate / token,
            10.0 * rate / token
        );
        Ok(told)
    }
}
