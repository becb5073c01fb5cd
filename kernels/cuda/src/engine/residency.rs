//! Which experts of a model in banks have rooms on the GPU. Kernels count which experts rows choose; between steps the
//! host reads the counts, and gives rooms of experts that are chosen less to some that are chosen more.
//!
//! Everything is in the order of the session's stream: an expert is copied to a room that no queued work reads, and read
//! there by work that is queued after the copy has ended, so no step ever sees a room change. What kernels compute does
//! not depend on any of this.

mod policy;
mod rooms;

use super::held::{HeldLayer, stack};
use super::weights::{BankShape, expert_table};
use crate::bank::{CountsRead, ExpertPlace, ExpertTable, Half, LayerBank, StageSizes, TableWriter};
use crate::{DeviceLinear, Gpu, GroupedRows, Mark, Stream, StreamOptions, Uploader};
use nq_formats::{Weight, human_bytes};
use nq_model::ModelConfig;
use nq_runtime::interface::{ExpertChoices, HeatKeeper, LayerChoices};
use nq_runtime::models::LayerWeights;
use nq_runtime::weights::Kinds;
use nq_runtime::{Error, Result};
use policy::Heat;
use rooms::LayerRooms;
use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Routes of rows for each expert of a layer from which on all experts of the next one are brought to prompts before it
/// is known which ones it needs: in texts, fewer rows leave a part of them out.
const ROUTES_OF_ALL: usize = 64;

/// Most experts of all layers that begin to move between two steps: what they take of the bus, steps lack.
const MOST_AT_ONCE: usize = 24;

/// Most readings of the counts on their way: more than the steps that are queued ahead.
const READINGS: usize = 8;

/// Which layers have banks, and with how many rooms.
#[derive(Clone, Copy)]
pub(super) struct BankLayers {
    /// Of each of them.
    pub(super) rooms: usize,
    /// The first layers, without banks: all their experts are on the GPU.
    pub(super) whole: usize,
}

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
    /// The rate at which kernels read banks, in bytes per second.
    bus: f64,
    /// A share for each session.
    sessions: Arc<()>,
}

/// What is in which room, and what moves.
struct Residency {
    /// [layers, experts of the table]
    places: Vec<ExpertPlace>,
    /// By layer.
    rooms: Vec<LayerRooms>,
    heat: Heat,
    /// The latest counts.
    counts: Vec<u32>,
    /// On their way, the earliest first.
    readings: VecDeque<Reading>,
    unused: Vec<CountsRead>,
    /// Whether each expert was in a room for work that was queued after the latest of the readings.
    in_rooms: Arc<[bool]>,
    /// By layer: how many experts have moved.
    moved_in: Vec<u64>,
    writer: TableWriter,
    copies: Stream,
    /// Rooms that copies fill, the earliest first.
    coming: VecDeque<RoomsUntil>,
    /// Rooms that experts have left, the earliest first.
    left: VecDeque<RoomsUntil>,
}

/// Rooms that change when a stream has come to a mark.
struct RoomsUntil {
    /// Each with its layer.
    rooms: Vec<LayerRoom>,
    end: Mark,
}

#[derive(Clone, Copy)]
struct LayerRoom {
    layer: usize,
    room: usize,
}

/// A reading of the counts, with whether each expert was in a room for the choices since the reading before.
struct Reading {
    counts: CountsRead,
    in_rooms: Arc<[bool]>,
}

/// Experts of a layer on their way to the stage of a session.
pub(super) struct Coming {
    layer: usize,
    end: Mark,
}

impl ModelBank {
    /// Locks the memory of all banks, and allocates rooms and table, before anything is packed. The computer must have room
    /// for the banks: the system would end a process that locks more.
    ///
    /// # Errors
    /// [`nq_kernels::Error::DeviceMemory`], also if the system does not lock so much; a weight that no kernel serves.
    pub(super) fn new(
        gpu: &Gpu,
        c: &ModelConfig,
        kinds: Kinds<'_>,
        BankLayers { rooms, whole }: BankLayers,
        stage: StageSizes,
    ) -> Result<Self> {
        let shapes = (0..c.num_hidden_layers).map(|index| {
            if index < whole {
                return Ok(None);
            }
            let spec = c.layer(index);
            let held = HeldLayer::new(c, spec, false, |kind| kinds(&spec.linear(kind).name(index)));
            BankShape::of(c, kinds, index, &held)
        });
        let shapes = shapes.collect::<Result<Vec<_>>>()?;
        let bus = gpu.copy_bandwidth()?;
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
        let reading = |_| CountsRead::new(gpu, &table);
        let residency = Residency {
            places: vec![ExpertPlace::Bank; table.counts().len()],
            rooms: vec![LayerRooms::new(rooms); c.num_hidden_layers],
            heat: Heat::new(c.num_hidden_layers, experts),
            counts: vec![0; table.counts().len()],
            readings: VecDeque::new(),
            unused: (0..READINGS).map(reading).collect::<Result<_, _>>()?,
            in_rooms: vec![false; table.counts().len()].into(),
            moved_in: vec![0; c.num_hidden_layers],
            writer: TableWriter::new(gpu, &table)?,
            copies: gpu.stream_with(StreamOptions::default())?,
            coming: VecDeque::new(),
            left: VecDeque::new(),
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
            bus,
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
        index: usize,
        plain: bool,
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
        let shared = held.has_shared().then(|| bank.experts() - 1);
        if let Some(shared) = shared {
            residency.heat.keep(index, shared);
        }
        let first = shared.into_iter().chain(0..bank.experts());
        let each = residency.places.len() / residency.rooms.len();
        for (room, expert) in first.take(LayerRooms::held_of(self.rooms)).enumerate() {
            bank.move_in(uploader.stream(), expert, room)?;
            residency.rooms[index].put(room, expert);
            residency.places[index * each + expert] = ExpertPlace::Room(room);
        }
        self.layers.push(Some(Arc::clone(&bank)));
        if self.layers.len() == self.empty.len() {
            let (table, layers) = (&self.table, &self.layers);
            (residency.writer).write(uploader.stream(), table, layers, &residency.places)?;
            residency.in_rooms = residency.rooms_of_places();
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
            let held = rooms.held().count();
            let wanted = residency.heat.hottest(layer, experts, held);
            let places = &mut residency.places[layer * each..][..experts];
            let absent = |&e: &usize| places[e] == ExpertPlace::Bank;
            let coming: Vec<usize> = wanted.iter().copied().filter(absent).collect();
            let leaving: Vec<_> = rooms.held().filter(|(e, _)| !wanted.contains(e)).collect();
            for ((leaves, room), expert) in leaving.into_iter().zip(coming) {
                bank.move_in(&residency.copies, expert, room)?;
                rooms.put(room, expert);
                places[leaves] = ExpertPlace::Bank;
                places[expert] = ExpertPlace::Room(room);
            }
        }
        let (writer, copies) = (&mut residency.writer, &residency.copies);
        writer.write(copies, &self.table, &self.layers, &residency.places)?;
        residency.in_rooms = residency.rooms_of_places();
        Ok(residency.copies.synchronize()?)
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
        // Then the session's own stream can see no table but the latest.
        for rooms in residency.coming.iter().chain(&residency.left) {
            rooms.end.wait()?;
        }
        Ok(share)
    }

    /// To be called between the steps and prompts that are queued in the `stream` of a session: takes the counts that
    /// have come, and lets experts move. Never waits.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(super) fn adapt(&self, stream: &Stream) -> Result<()> {
        if Arc::strong_count(&self.sessions) > 2 {
            return Ok(());
        }
        let residency = &mut *lock(&self.residency);
        residency.forget_left()?;
        let taken = residency.take_counts()?;
        let left = residency.arrive()?;
        if !left.is_empty() {
            let (table, layers) = (&self.table, &self.layers);
            (residency.writer).write(stream, table, layers, &residency.places)?;
            let end = stream.mark()?;
            residency.left.push_back(RoomsUntil { rooms: left, end });
        }
        if taken {
            residency.fill(&self.layers)?;
        }
        if let Some(mut counts) = residency.unused.pop() {
            counts.queue(stream, &self.table)?;
            // The table that was written above holds for later work.
            let later = residency.rooms_of_places();
            let in_rooms = std::mem::replace(&mut residency.in_rooms, later);
            residency.readings.push_back(Reading { counts, in_rooms });
        }
        Ok(())
    }

    /// The choices of experts so far.
    pub(super) fn choices(&self) -> ExpertChoices {
        let residency = lock(&self.residency);
        let hits = residency.heat.hits().iter().zip(&residency.moved_in);
        let banks = self.layers.iter().zip(hits);
        let layers = banks.filter_map(|(bank, (hits, &moved))| {
            Some(LayerChoices {
                in_room: hits.in_room,
                all: hits.all,
                moved,
                expert_bytes: bank.as_deref()?.expert_bytes(),
            })
        });
        ExpertChoices {
            layers: layers.collect(),
            bus: self.bus,
        }
    }
}

impl Drop for ModelBank {
    fn drop(&mut self) {
        let residency = lock(&self.residency);
        let chosen = residency.heat.hits().iter().any(|hits| hits.all > 0);
        if let Some(keeper) = self.keeper.get().filter(|_| chosen) {
            keeper.keep(&residency.heat.values(self.routed));
        }
    }
}

impl Residency {
    /// Forgets what was in rooms that no queued work reads any more.
    fn forget_left(&mut self) -> Result<()> {
        while let Some(first) = self.left.front() {
            if !first.end.has_passed()? {
                break;
            }
            let rooms = self.left.pop_front().map_or(Vec::new(), |left| left.rooms);
            for LayerRoom { layer, room } in rooms {
                self.rooms[layer].forget(room);
            }
        }
        Ok(())
    }

    /// Lets later work read the experts whose copies are done in their rooms, and others leave for them, whose rooms are
    /// returned: the table is to be written if there are any.
    fn arrive(&mut self) -> Result<Vec<LayerRoom>> {
        let each = self.places.len() / self.rooms.len();
        let mut all = Vec::new();
        while let Some(first) = self.coming.front() {
            if !first.end.has_passed()? {
                break;
            }
            let come = self
                .coming
                .pop_front()
                .map_or(Vec::new(), |come| come.rooms);
            for LayerRoom { layer, room } in come {
                let rooms = &mut self.rooms[layer];
                let Some(expert) = rooms.arrive(room) else {
                    continue;
                };
                self.places[layer * each + expert] = ExpertPlace::Room(room);
                self.moved_in[layer] += 1;
                if let Some((leaves, room)) = rooms.leave(self.heat.of_layer(layer), expert) {
                    self.places[layer * each + leaves] = ExpertPlace::Bank;
                    all.push(LayerRoom { layer, room });
                }
            }
        }
        Ok(all)
    }

    /// Whether each expert is in a room by the places that were written last.
    fn rooms_of_places(&self) -> Arc<[bool]> {
        let places = self.places.iter();
        places
            .map(|at| matches!(at, ExpertPlace::Room(_)))
            .collect()
    }

    /// Takes the counts that have come; false if there are none.
    fn take_counts(&mut self) -> Result<bool> {
        let mut taken = false;
        while let Some(reading) = self.readings.front_mut() {
            let Some(counts) = reading.counts.take()? else {
                break;
            };
            let in_rooms = &reading.in_rooms;
            (self.heat).take(counts, &mut self.counts, |i| in_rooms[i]);
            taken = true;
            let reading = self.readings.pop_front();
            self.unused.extend(reading.map(|r| r.counts));
        }
        Ok(taken)
    }

    /// Begins to copy experts to empty rooms.
    fn fill(&mut self, layers: &[Option<Arc<LayerBank>>]) -> Result<()> {
        let mut wanted = Vec::new();
        for (layer, bank) in layers.iter().enumerate() {
            let Some(bank) = bank else { continue };
            wanted.extend(self.heat.wanted(layer, bank.experts(), &self.rooms[layer]));
        }
        // The hottest of all layers first.
        wanted.sort_by(|a, b| b.gain.total_cmp(&a.gain));
        wanted.truncate(MOST_AT_ONCE);
        let mut rooms = Vec::new();
        for wanted in wanted {
            let (layer, expert) = (wanted.layer, wanted.expert);
            if let (Some(bank), Some(room)) = (&layers[layer], self.rooms[layer].fill(expert)) {
                bank.move_in(&self.copies, expert, room)?;
                rooms.push(LayerRoom { layer, room });
            }
        }
        if !rooms.is_empty() {
            let end = self.copies.mark()?;
            self.coming.push_back(RoomsUntil { rooms, end });
        }
        Ok(())
    }
}

fn lock(residency: &Mutex<Residency>) -> MutexGuard<'_, Residency> {
    residency.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ModelBank {
    /// Where experts are, and what that allows, for the user.
    pub(super) fn told(&self) -> String {
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
        match self.layers.iter().take_while(|l| l.is_none()).count() {
            0 => {}
            whole => {
                told = format!(
                    "the computer's memory has no room for the experts of {whole} layers, which are all on the GPU; of the \
                     other layers {told}"
                );
            }
        }
        let (rate, token) = (self.bus, bytes(&|_| self.per_token) as f64);
        told += &format!(
            " at {:.0} GB/s: at most {:.0} tokens a second where a text finds none of its experts on the GPU, {:.0} where it \
             finds 9 of 10",
            rate / 1e9,
            rate / token,
            10.0 * rate / token
        );
        told
    }
}
