//! The layout of packed weights in trellis codes: [`super`] describes it.

use crate::memory::Buffer;
use crate::simd::LANES;
use crate::team::{Team, spread};
use half::f16;
use nq_formats::TrellisWeight;
use nq_formats::trellis::{self, Code, STRIP, TILE, TrellisScheme};
use nq_model::Dims;
use std::sync::Arc;

/// Panels of a strip.
pub(crate) const PANELS: usize = STRIP / LANES;

/// Sequences of a tile.
pub(in crate::linear) const SEQUENCES: usize = trellis::LANES;

/// Bits of a step that kernels are compiled for.
const STEP_BITS: [usize; 8] = [2, 3, 4, 5, 6, 7, 8, 10];

/// Quads of inputs in a part.
pub(in crate::linear) const QUADS: usize = 8;

/// Factors of inputs; equal if they are the same in memory.
#[derive(Clone)]
pub(crate) struct InputScales(pub(crate) Arc<[f16]>);

impl PartialEq for InputScales {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What a packed trellis weight has beside its words.
pub(crate) struct PackedTrellis {
    pub(crate) scheme: TrellisScheme,
    /// Factors of the inputs, before they are transformed.
    pub(crate) input_scales: InputScales,
}

impl PackedTrellis {
    /// The code.
    pub(crate) fn code(&self) -> Code {
        self.scheme.code()
    }

    /// Parts of a tile: [`products`](super::products).
    pub(in crate::linear) fn parts(&self) -> usize {
        TILE / (QUADS * self.code().width())
    }

    /// Parts of this many inputs.
    pub(super) fn parts_of_row(&self, inputs: usize) -> usize {
        inputs / TILE * self.parts() + inputs % TILE / (QUADS * self.code().width())
    }

    /// Index of the steps' bits in tables of kernels.
    pub(super) fn place(&self) -> usize {
        let bits = self.scheme.step_bits() as usize;
        let place = STEP_BITS.iter().position(|&b| b == bits);
        place.expect("a scheme checks the bits of its steps")
    }
}

/// Words of a weight `[rows, inputs]`, padded to strips.
pub(crate) fn words(scheme: TrellisScheme, Dims { rows, cols: inputs }: Dims) -> usize {
    rows.div_ceil(STRIP) * (inputs / TILE) * SEQUENCES * scheme.words()
}

/// The words of `w` in the layout of this module, in parallel.
pub(crate) fn pack(team: &Team, w: &TrellisWeight) -> Buffer<u32> {
    let scheme = w.scheme();
    let each = scheme.words();
    let mut data = Buffer::weights(words(scheme, Dims::new(w.out_features(), w.in_features())));
    let (from, _) = w.words().as_chunks::<4>();
    let tile = SEQUENCES * each;
    spread(team, &mut data, tile, |index, data| {
        let from = &from[index * tile..][..tile];
        for (i, to) in data.iter_mut().enumerate() {
            let place = trellis::word_place(each, i % SEQUENCES, i / SEQUENCES);
            *to = u32::from_le_bytes(from[place]);
        }
    });
    data
}
