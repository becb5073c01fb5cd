//! Experts of mixtures that do not all have room in the GPU's memory.
//!
//! A **bank** is page-locked memory of the host with all experts of a layer, which kernels read over PCIe. Some of
//! them also have a **room** in the GPU's memory. A table there says where kernels read each expert
//! (`cuda/places.cuh`): what they compute does not depend on it, a step needs no host, and a recorded one stays valid
//! when experts move. Kernels count how often rows choose each expert, so that the host can give the rooms to those
//! that are chosen most.

use super::driver::{Address, Buffer, Gpu, Locked, Mark, Operands, Pinned, Stream};

use super::pack::{PackedKind, PackedShape, Packing, SPAN, Stack, TILE};
use super::trellis::stack::TrellisParts;
use crate::cuda::places::ExpertPlaces;
use nq_formats::Weight;
use nq_formats::trellis::STRIP;
use nq_kernels::{Error, Result};
use nq_model::Dims;
use std::sync::Arc;

/// The half of a mixture that a product is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// Gate and up, interleaved.
    Up,
    /// Down.
    Down,
}

impl Half {
    const ALL: [Half; 2] = [Half::Up, Half::Down];
}

/// Where kernels read an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlace {
    /// In the bank.
    Bank,
    /// In this room of its layer.
    Room(usize),
}

/// Bytes between what an expert has begin at multiples of this, as copies to shared memory end sooner then.
const ALIGN: usize = 128;

/// Where an expert's codes and scales lie among its bytes, the same for all experts of a layer.
#[derive(Clone, Copy, Debug)]
struct ExpertLayout {
    /// An expert's parts of the stacks.
    shapes: [PackedShape; 2],
    codes: [usize; 2],
    meta: [usize; 2],
    /// Of an expert.
    bytes: usize,
}

impl ExpertLayout {
    fn new(shapes: [PackedShape; 2]) -> Self {
        let mut bytes = 0usize;
        let mut take = |part: usize| {
            let at = bytes;
            bytes += part.next_multiple_of(ALIGN);
            at
        };
        let [up, down] = shapes.map(|s| (take(s.codes_bytes()), take(s.meta_bytes())));
        ExpertLayout {
            shapes,
            codes: [up.0, down.0],
            meta: [up.1, down.1],
            bytes,
        }
    }
}

/// Bytes of a bank of `experts` experts, whose parts of the stacks of gate and up and of down have these shapes.
pub(crate) fn bank_bytes(shapes: [PackedShape; 2], experts: usize) -> usize {
    ExpertLayout::new(shapes).bytes.saturating_mul(experts)
}

/// The table of a model's experts, and their counts. Both have [layers, experts].
pub struct ExpertTable {
    places: Buffer<u64>,
    counts: Buffer<u32>,
    experts: usize,
}

impl ExpertTable {
    /// Allocates both for so many layers of so many experts.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, layers: usize, experts: usize) -> Result<Self> {
        Ok(ExpertTable {
            places: gpu.zeros("the table of experts", layers * experts)?,
            counts: gpu.zeros("the table of experts", layers * experts)?,
            experts,
        })
    }

    /// How often rows have chosen each expert, modulo 2^32.
    pub fn counts(&self) -> &Buffer<u32> {
        &self.counts
    }
}

/// The experts of a layer: all in the bank, and rooms for some.
pub struct LayerBank {
    layout: ExpertLayout,
    host: Locked,
    rooms: Buffer<u8>,
    room_count: usize,
    places: Buffer<u64>,
    counts: Buffer<u32>,
    experts: usize,
    /// Its first expert in the table.
    first: usize,
    /// What experts in trellis codes share, of gate and up, and of down.
    coded: [Option<TrellisParts>; 2],
}

impl LayerBank {
    /// Allocates the bank of layer `index` of a model with this table, and `rooms` rooms, for `experts` experts of
    /// these sizes, of gate and up and of down.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`], also if the system does not lock so much memory; [`Error::Shape`] for a layer or
    /// experts that the table does not have.
    pub(crate) fn new(
        gpu: &Gpu,
        table: &ExpertTable,
        index: usize,
        experts: usize,
        shapes: [PackedShape; 2],
        rooms: usize,
    ) -> Result<Self> {
        let first = index.saturating_mul(table.experts);
        if experts > table.experts || first.saturating_add(experts) > table.places.len() {
            return Err(Error::Shape {
                op: "a bank of experts",
                what: "experts of a layer",
                expected: format!("{} of {} in all", table.experts, table.places.len()),
                found: format!("{experts} of layer {index}"),
            });
        }
        let layout = ExpertLayout::new(shapes);
        let size = |count: usize| layout.bytes.saturating_mul(count);
        let coded = |half: Half| match shapes[half as usize] {
            PackedShape {
                kind: PackedKind::Trellis(scheme),
                tiles,
                spans,
            } => {
                let dims = Dims::new(tiles * TILE, spans * SPAN);
                TrellisParts::of_bank(gpu, scheme, experts, dims, half == Half::Up).map(Some)
            }
            _ => Ok(None),
        };
        Ok(LayerBank {
            coded: [coded(Half::Up)?, coded(Half::Down)?],
            layout,
            host: gpu.locked("experts in the computer's memory", size(experts))?,
            rooms: gpu.zeros("weights", size(rooms))?,
            room_count: rooms,
            places: table.places.share(),
            counts: table.counts.share(),
            experts,
            first,
        })
    }

    /// Bytes of an expert.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.layout.bytes
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Number of rooms.
    pub fn rooms(&self) -> usize {
        self.room_count
    }

    /// Packs a stack of all experts into the bank, with values of FP16 if `plain` and if they are in trellis codes.
    /// Returns the scale of all.
    ///
    /// # Errors
    /// Errors of [`Packing::new`]; [`Error::Shape`] if the stack is not of the bank's sizes.
    pub(crate) fn pack(
        &mut self,
        half: Half,
        parts: &[&Weight],
        stack: Stack,
        plain: bool,
    ) -> Result<f32> {
        let packing = Packing::new(parts, stack, plain)?;
        let i = half as usize;
        let ExpertLayout { shapes, bytes, .. } = self.layout;
        let (shape, codes, meta) = (shapes[i], self.layout.codes[i], self.layout.meta[i]);
        let found = (packing.kind(), packing.tiles(), packing.spans());
        let expected = (shape.kind, self.experts * shape.tiles, shape.spans);
        if found != expected {
            return Err(Error::Shape {
                op: "packing",
                what: "a stack of experts (kind, tiles, spans)",
                expected: format!("{expected:?}"),
                found: format!("{found:?}"),
            });
        }
        if let Some(coded) = &mut self.coded[i] {
            let (host, strips) = (self.host.bytes_mut()?, shape.tiles * TILE / STRIP);
            coded.fill_bank(parts, stack, |at, words, scales| {
                let expert = &mut host[at / strips * bytes..][..bytes];
                let nth = at % strips;
                expert[codes + nth * words.len()..][..words.len()].copy_from_slice(words);
                let scales: &[u8] = bytemuck::cast_slice(scales);
                expert[meta + nth * scales.len()..][..scales.len()].copy_from_slice(scales);
            })?;
            return Ok(packing.scale());
        }
        let all = self.host.bytes_mut()?.chunks_exact_mut(bytes);
        for (e, expert) in all.enumerate() {
            // Codes stand in front of scales.
            let (front, back) = expert.split_at_mut(meta);
            packing.pack(
                e * shape.tiles,
                &mut front[codes..codes + shape.codes_bytes()],
                &mut back[..shape.meta_bytes()],
            )?;
        }
        Ok(packing.scale())
    }

    /// Copies `expert` from the bank to a room, in order with the stream's other work.
    ///
    /// # Errors
    /// [`Error::Shape`] if there is no such expert or room; errors of the driver.
    pub(crate) fn move_in(&self, stream: &Stream, expert: usize, room: usize) -> Result<()> {
        let bytes = self.layout.bytes;
        let at = |n: usize| n.saturating_mul(bytes);
        stream.write_locked(&self.rooms, at(room), &self.host, at(expert), bytes)
    }

    /// The arguments of kernels that follow the table, which keep all that it leads to.
    pub(crate) fn args(&self, o: &Operands<'_>) -> Result<ExpertPlaces> {
        let all = [self.experts];
        o.locked(
            "the bank",
            &self.host,
            0,
            &[self.experts * self.layout.bytes],
        )?;
        o.of("rooms", &self.rooms, &[self.room_count * self.layout.bytes])?;
        Ok(ExpertPlaces {
            at: o.part("places of experts", &self.places, self.first, &all)?,
            counts: o.part("counts of experts", &self.counts, self.first, &all)?,
            codes: self.layout.codes.map(|at| at as u32),
            meta: self.layout.meta.map(|at| at as u32),
        })
    }

    /// The address of an expert.
    fn address(&self, o: &Operands<'_>, expert: usize, place: ExpertPlace) -> Result<Address> {
        let bytes = self.layout.bytes;
        match place {
            ExpertPlace::Bank => o.locked("an expert", &self.host, expert * bytes, &[bytes]),
            ExpertPlace::Room(room) => o.part("a room", &self.rooms, room * bytes, &[bytes]),
        }
    }
}

/// A product whose weights are one half of a bank's experts.
#[derive(Clone)]
pub(crate) struct BankHalf {
    pub(crate) layer: Arc<LayerBank>,
    pub(crate) half: Half,
    pub(crate) scale: f32,
    /// Of an expert.
    pub(crate) inputs: usize,
}

impl BankHalf {
    /// The part of an expert, and the number of experts.
    pub(crate) fn shape(&self) -> (PackedShape, usize) {
        let layer = &self.layer;
        (layer.layout.shapes[self.half as usize], layer.experts)
    }

    /// What its experts share, if they are in a trellis code.
    pub(crate) fn coded(&self) -> Option<&TrellisParts> {
        self.layer.coded[self.half as usize].as_ref()
    }

    /// The memory that its operand shows: the rooms.
    pub(crate) fn memory(&self) -> Buffer<u8> {
        self.layer.rooms.share()
    }
}

/// Writes the table of a model's experts, which kernels of a stream follow.
pub struct TableWriter {
    /// Used in turn, so that a write need not wait for the one before.
    turns: [Pinned<u64>; 4],
    turn: usize,
}

impl TableWriter {
    /// Allocates it for a table.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, table: &ExpertTable) -> Result<Self> {
        let turn = || gpu.pinned("the table of experts", table.places.len());
        Ok(TableWriter {
            turns: [turn()?, turn()?, turn()?, turn()?],
            turn: 0,
        })
    }

    /// Writes where the experts of all layers are, in order with the stream's other work. `layers` has `None` for
    /// layers without a bank; `places` has those of all layers one after the other.
    ///
    /// # Errors
    /// [`Error::Shape`] for a room that a layer does not have, or another number of places; errors of the driver.
    pub fn write(
        &mut self,
        stream: &Stream,
        table: &ExpertTable,
        layers: &[Option<Arc<LayerBank>>],
        places: &[ExpertPlace],
    ) -> Result<()> {
        let o = stream.operands("places of experts");
        if places.len() != table.places.len() || layers.len() * table.experts != places.len() {
            return o.refuse("places", table.places.len(), places.len());
        }
        self.turn = (self.turn + 1) % self.turns.len();
        let host = &mut self.turns[self.turn];
        let values = host.values_mut()?;
        let each = values.chunks_mut(table.experts);
        for ((to, layer), places) in each.zip(layers).zip(places.chunks(table.experts)) {
            let Some(layer) = layer else { continue };
            let there = to.iter_mut().zip(places).take(layer.experts);
            for (e, (to, place)) in there.enumerate() {
                *to = layer.address(&o, e, *place)?.number();
            }
        }
        stream.write(&mut table.places.share(), 0, host, 0..places.len())
    }
}

/// How large the stacks of [`ExpertStage`] are, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageSizes {
    codes: [usize; 2],
    meta: [usize; 2],
}

impl StageSizes {
    /// With room for these stacks of so many experts, too.
    pub(crate) fn with(self, shapes: [PackedShape; 2], experts: usize) -> Self {
        let most = |held: usize, bytes: usize| held.max(bytes.saturating_mul(experts));
        let Self { codes, meta } = self;
        StageSizes {
            codes: [0, 1].map(|i| most(codes[i], shapes[i].codes_bytes())),
            meta: [0, 1].map(|i| most(meta[i], shapes[i].meta_bytes())),
        }
    }
}

/// Stacks in the GPU's memory, made of a bank's experts that many rows go through: products of many rows read weights
/// several times, and each over PCIe would take too long. There are two of them, so that those of the next
/// layer come while products read those of a layer.
pub struct ExpertStage {
    turns: [StagedStacks; 2],
    /// How many rows each expert has.
    pub(crate) rows: Buffer<u32>,
}

/// Codes and scales of gate and up, and of down.
struct StagedStacks {
    codes: [Buffer<u8>; 2],
    meta: [Buffer<u8>; 2],
}

/// Where a stack is.
pub(crate) struct PackedMemory<'a> {
    pub(crate) codes: &'a Buffer<u8>,
    pub(crate) meta: &'a Buffer<u8>,
}

/// Which stacks of an [`ExpertStage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StageTurn {
    #[default]
    First,
    Second,
}

impl StageTurn {
    /// The other stacks.
    pub(crate) fn other(self) -> Self {
        match self {
            StageTurn::First => StageTurn::Second,
            StageTurn::Second => StageTurn::First,
        }
    }
}

impl ExpertStage {
    /// Allocates it.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, sizes: StageSizes, experts: usize) -> Result<Self> {
        let stack = |bytes: usize| gpu.zeros("staged experts", bytes);
        let StageSizes { codes, meta } = sizes;
        let turn = || -> Result<_> {
            Ok(StagedStacks {
                codes: [stack(codes[0])?, stack(codes[1])?],
                meta: [stack(meta[0])?, stack(meta[1])?],
            })
        };
        Ok(ExpertStage {
            turns: [turn()?, turn()?],
            rows: gpu.zeros("staged experts", experts)?,
        })
    }

    /// The same memory once more.
    pub(crate) fn share(&self) -> Self {
        ExpertStage {
            turns: self.turns.each_ref().map(|stacks| StagedStacks {
                codes: stacks.codes.each_ref().map(Buffer::share),
                meta: stacks.meta.each_ref().map(Buffer::share),
            }),
            rows: self.rows.share(),
        }
    }

    /// Codes and scales of the stack of a half.
    pub(crate) fn stack(&self, half: Half, turn: StageTurn) -> PackedMemory<'_> {
        let (stacks, i) = (&self.turns[turn as usize], half as usize);
        PackedMemory {
            codes: &stacks.codes[i],
            meta: &stacks.meta[i],
        }
    }

    /// What [`Stream::stage_experts`] copies: addresses of the stacks, where their parts begin in an expert, and their
    /// sizes in an expert, the latter in words of 16 bytes.
    pub(crate) fn parts(
        &self,
        o: &Operands<'_>,
        layer: &LayerBank,
        turn: StageTurn,
    ) -> Result<[StagedPart; 4]> {
        let ExpertLayout {
            shapes,
            codes,
            meta,
            ..
        } = layer.layout;
        let stacks = &self.turns[turn as usize];
        let mut all = [StagedPart::default(); 4];
        for half in Half::ALL {
            let i = half as usize;
            let of_codes = (&stacks.codes[i], codes[i], shapes[i].codes_bytes());
            let of_meta = (&stacks.meta[i], meta[i], shapes[i].meta_bytes());
            for (k, (to, begin, bytes)) in [of_codes, of_meta].into_iter().enumerate() {
                all[2 * i + k] = StagedPart {
                    to: o.of("staged experts", to, &[layer.experts, bytes])?,
                    begin: (begin / 16) as u32,
                    words: (bytes / 16) as u32,
                };
            }
        }
        Ok(all)
    }
}

/// A part of an expert that is copied to a stack.
#[derive(Clone, Copy, Default)]
pub(crate) struct StagedPart {
    pub(crate) to: Address,
    pub(crate) begin: u32,
    pub(crate) words: u32,
}

/// A copy of a model's counts, on its way to the host.
pub struct CountsRead {
    host: Pinned<u32>,
    /// Behind the copy that is on its way.
    end: Option<Mark>,
}

impl CountsRead {
    /// Allocates it for a table.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`].
    pub fn new(gpu: &Gpu, table: &ExpertTable) -> Result<Self> {
        Ok(CountsRead {
            host: gpu.pinned("counts of experts", table.counts.len())?,
            end: None,
        })
    }

    /// Queues a copy behind the stream's work.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn queue(&mut self, stream: &Stream, table: &ExpertTable) -> Result<()> {
        stream.read(&table.counts, 0, &mut self.host, 0..table.counts.len())?;
        self.end = Some(stream.mark()?);
        Ok(())
    }

    /// The counts, if the copy is there; then another may be queued.
    ///
    /// # Errors
    /// Errors of the work before the copy.
    pub fn take(&mut self) -> Result<Option<&[u32]>> {
        match &self.end {
            Some(end) if end.has_passed()? => {
                self.end = None;
                self.host.values().map(Some)
            }
            _ => Ok(None),
        }
    }
}
