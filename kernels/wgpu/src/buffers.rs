//! The buffers of a session.

use crate::gpu::Gpu;
use crate::sizes::{Part, Sizes};
use nq_model::ModelConfig;
use nq_runtime::Result;
use nq_runtime::states::is_recurrent;
use std::ops::Index;
use wgpu::Buffer;

/// The buffers of a session.
pub(crate) struct Buffers {
    /// Sizes of the pass, and of what goes through the head.
    pub(crate) step: Buffer,
    pub(crate) head_step: Buffer,
    /// In the order of [`Part::ALL`].
    parts: Vec<Buffer>,
    /// Rows of a pass at most.
    pub(crate) rows: usize,
    /// By layer.
    pub(crate) kept: Vec<Kept>,
    /// From which the host reads logits or rows, and the best tokens.
    pub(crate) results: Buffer,
    pub(crate) drawn: Buffer,
}

/// A buffer of parts of as many bytes: pages or states.
#[derive(Clone, Copy)]
pub(crate) struct CopyPlaces<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) bytes: usize,
}

/// What a layer keeps of sequences.
pub(crate) enum Kept {
    /// Keys and values of its attention, and scales of both, by page.
    Pages([Buffer; 3]),
    /// States of its recurrence, by place.
    States(Buffer),
}

impl Index<Part> for Buffers {
    type Output = Buffer;

    fn index(&self, part: Part) -> &Buffer {
        &self.parts[part as usize]
    }
}

impl Buffers {
    /// Allocates them.
    ///
    /// # Errors
    /// [`Error::Device`](nq_runtime::Error::Device) if memory is short.
    pub(crate) fn new(gpu: &Gpu, sizes: &Sizes, c: &ModelConfig) -> Result<Self> {
        let kept = c.layers().map(|layer| match is_recurrent(layer) {
            true => gpu.buffer("states", sizes.states).map(Kept::States),
            false => {
                let [keys, values, scales] = sizes.kept();
                Ok(Kept::Pages([
                    gpu.buffer("keys", keys)?,
                    gpu.buffer("values", values)?,
                    gpu.buffer("scales of keys and values", scales)?,
                ]))
            }
        });
        Ok(Buffers {
            kept: kept.collect::<Result<_>>()?,
            results: gpu.staging(sizes.results())?,
            drawn: gpu.staging(sizes.part(Part::Best))?,
            ..Buffers::of_layers(gpu, sizes.rows, |part| sizes.part(part))?
        })
    }

    /// Those that layers hand to one another, for passes of up to `rows` rows.
    ///
    /// # Errors
    /// As [`Buffers::new`].
    pub(crate) fn of_layers(gpu: &Gpu, rows: usize, bytes: impl Fn(Part) -> usize) -> Result<Self> {
        let parts = Part::ALL.map(|part| gpu.buffer(&format!("{part:?}"), bytes(part)));
        Ok(Buffers {
            step: gpu.uniform(&[0; 8])?,
            head_step: gpu.uniform(&[0; 8])?,
            parts: parts.into_iter().collect::<Result<_>>()?,
            rows,
            kept: Vec::new(),
            results: gpu.staging(0)?,
            drawn: gpu.staging(0)?,
        })
    }

    /// Keys, values and their scales of all layers with attention, with the bytes of a page of each.
    pub(crate) fn pages(&self, sizes: &Sizes) -> Vec<CopyPlaces<'_>> {
        let all = self.kept.iter().map(|kept| match kept {
            Kept::Pages(pages) => &pages[..],
            Kept::States(_) => &[],
        });
        let places = |(buffer, bytes)| CopyPlaces { buffer, bytes };
        let all = all.flat_map(|pages| pages.iter().zip(sizes.page).map(places));
        all.filter(|places| places.bytes > 0).collect()
    }

    /// States of all layers with recurrences, with the bytes of one.
    pub(crate) fn states(&self, sizes: &Sizes) -> Vec<CopyPlaces<'_>> {
        let bytes = sizes.state;
        let all = self.kept.iter().filter_map(|kept| match kept {
            Kept::States(buffer) => Some(CopyPlaces { buffer, bytes }),
            Kept::Pages(_) => None,
        });
        all.collect()
    }
}
