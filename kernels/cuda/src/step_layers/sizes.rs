//! The sizes of models whose layers run at once, and whether their products can be dealt to blocks.

use super::limits::{
    BLOCK_DIGITS_BYTES, DIGITS_BYTES, MOST_GROUP, MOST_PARTS, MOST_ROUTE, MOST_STRIP_PARTS,
    PRODUCTS, WARPS,
};
use crate::attention::row_heads;
use crate::cuda::layers::ProductShape;
use crate::mixture::{MOST_EXPERTS, chosen, stacked};
use nq_formats::trellis::{BLOCK, STRIP, TILE};
use nq_kernels::delta::DeltaShape;
use nq_model::Experts;

/// Sizes of a model whose layers run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayersSizes {
    /// Values per token.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Width of a head: [`HEAD_DIM`](crate::HEAD_DIM) or [`WIDE_HEAD_DIM`](crate::WIDE_HEAD_DIM).
    pub head_dim: usize,
    /// The recurrence of layers without attention, if there are such layers.
    pub delta: Option<DeltaShape>,
    /// The mixtures of layers, if they have these in place of MLPs.
    pub experts: Option<Experts>,
    /// Width of an MLP, or of an expert.
    pub intermediate: usize,
    /// The weights of the layers are in trellis codes.
    pub trellis: bool,
}

impl LayersSizes {
    /// Rows and inputs of the products, in the order of `LayerProduct` of `cuda/layers.cuh`.
    pub(super) fn shapes(self) -> [(usize, usize); PRODUCTS] {
        let rows = row_heads(self.head_dim, self.heads, self.kv_heads);
        let inputs = self.delta.map_or(0, |d| d.channels() + d.values());
        [
            (rows * self.head_dim, self.hidden),
            (self.hidden, self.heads * self.head_dim),
            (2 * self.gated(), self.hidden),
            (self.hidden, self.gated()),
            (inputs, self.hidden),
        ]
    }

    /// Values between gate and up, and down.
    pub(super) fn gated(self) -> usize {
        self.experts.map_or(1, |e| chosen(&e)) * self.intermediate
    }

    /// Most inputs of `o` and `down`.
    pub(super) fn inner(self) -> usize {
        (self.heads * self.head_dim).max(self.gated())
    }

    /// Experts in a layer, with the shared one.
    pub(super) fn stacked(self) -> usize {
        self.experts.map_or(0, |e| stacked(&e))
    }

    /// Their tiles and spans.
    pub(super) fn products(self) -> [ProductShape; PRODUCTS] {
        let (tile, span) = if self.trellis {
            (STRIP, TILE)
        } else {
            (16, 256)
        };
        self.shapes().map(|(rows, inputs)| ProductShape {
            tiles: (rows / tile) as i32,
            spans: (inputs / span) as i32,
        })
    }

    /// Inputs that a warp gathers together.
    pub(super) fn gathered(self) -> usize {
        if self.trellis { BLOCK } else { 64 }
    }

    /// Bytes of the digits of so many inputs.
    pub(super) fn digits_bytes(self, inputs: usize) -> usize {
        match self.trellis {
            true => inputs / BLOCK * BLOCK_DIGITS_BYTES,
            false => inputs / 256 * DIGITS_BYTES,
        }
    }

    /// Bytes of the numbers of parts that tiles have, in shared memory.
    pub(super) fn counts(self) -> usize {
        match self.trellis {
            true => self.products().iter().map(|p| p.tiles as usize).sum(),
            false => self.hidden / 8,
        }
    }

    /// Most parts of a value of the residual stream.
    pub(super) fn parts(self) -> usize {
        if self.trellis {
            MOST_STRIP_PARTS
        } else {
            MOST_PARTS
        }
    }

    /// Most parts of a value of qkv, or of gate and up.
    pub(super) fn row_parts(self) -> usize {
        if self.trellis { MOST_STRIP_PARTS } else { 1 }
    }

    /// Words between gate and up, and down.
    pub(super) fn gated_words(self) -> usize {
        match self.trellis {
            true => MOST_STRIP_PARTS * 2 * self.gated(),
            false => self.gated(),
        }
    }

    /// Query heads of a key head.
    pub(super) fn group(self) -> usize {
        self.heads / self.kv_heads
    }

    pub(super) fn value_heads(self) -> usize {
        self.delta.map_or(1, |d| d.value_heads)
    }

    /// True if the products can be dealt to this many blocks, in clusters of so many.
    pub(super) fn fit(self, blocks: usize, cluster: usize) -> bool {
        let [qkv, o, gate_up, down, inputs] = self.products();
        let width = self.heads * self.head_dim;
        // Each block gathers some of the inputs of `o`.
        let gathers =
            width / self.gathered() >= cluster && self.delta.is_none_or(|d| d.values() == width);
        // Without clusters, each has a share of every product (`SharedInputs::receive` of `cuda/layers_cluster.cuh`).
        let firsts = [Some(qkv), Some(gate_up), self.delta.map(|_| inputs)];
        let shares = cluster > 1
            || self.trellis
            || firsts
                .into_iter()
                .flatten()
                .all(|p| p.tiles as usize >= blocks);
        let heads = self.group() <= MOST_GROUP && self.heads.is_multiple_of(self.kv_heads);
        let routes = self.experts.is_none_or(|e| {
            let counts = stacked(&e) <= MOST_EXPERTS.min(WARPS * blocks);
            counts && chosen(&e) <= MOST_ROUTE && e.width == self.intermediate
        });
        let enough = blocks >= self.kv_heads.max(self.value_heads());
        // What is dealt by records.
        let mut dealt = [o, down, qkv, gate_up].into_iter();
        let fits = |p: ProductShape| p.fits(blocks, self.parts());
        let deals = dealt.by_ref().take(2).all(fits) && (!self.trellis || dealt.all(fits));
        heads && routes && enough && gathers && shares && deals
    }
}

impl ProductShape {
    /// True if the records can be dealt to `blocks` blocks: each has some, or there would be parts that nobody
    /// writes, and no tile has too many parts.
    pub(super) fn fits(self, blocks: usize, most: usize) -> bool {
        let (tiles, spans) = (self.tiles as usize, self.spans as usize);
        let owner = |record: usize| ((record + 1) * blocks - 1) / (tiles * spans);
        let parts = |t: usize| owner((t + 1) * spans - 1) - owner(t * spans) + 1;
        tiles * spans >= blocks && (0..tiles).all(|t| parts(t) <= most)
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::TEAM;
    use super::super::{SharedMemory, cluster_of, stages_ahead};
    use super::*;
    use crate::Version;
    use crate::driver::GpuInfo;

    /// The published dense models.
    const MODELS: [LayersSizes; 14] = [
        sizes(1024, 16, 3072),
        sizes(2048, 16, 6144),
        sizes(2560, 32, 9728),
        sizes(4096, 32, 12288),
        sizes(5120, 40, 17408),
        sizes(5120, 64, 25600),
        hybrid(1024, (8, 2), (16, 16), 3584),
        hybrid(2048, (8, 2), (16, 16), 6144),
        hybrid(2560, (16, 4), (16, 32), 9216),
        hybrid(4096, (16, 4), (16, 32), 12288),
        hybrid(5120, (24, 4), (16, 48), 17408),
        // 30B-A3B and 35B-A3B; most experts that a stack has.
        mixture(sizes(2048, 32, 768), 128, 8, 0),
        mixture(hybrid(2048, (16, 2), (16, 32), 512), 256, 8, 512),
        mixture(hybrid(2048, (16, 2), (16, 32), 512), 511, 10, 512),
    ];

    const fn sizes(hidden: usize, heads: usize, intermediate: usize) -> LayersSizes {
        LayersSizes {
            hidden,
            heads,
            kv_heads: 8,
            head_dim: 128,
            delta: None,
            experts: None,
            intermediate,
            trellis: false,
        }
    }

    const fn mixture(
        sizes: LayersSizes,
        count: usize,
        per_token: usize,
        shared: usize,
    ) -> LayersSizes {
        let experts = Experts {
            count,
            per_token,
            width: sizes.intermediate,
            normalized: true,
            shared,
        };
        LayersSizes {
            experts: Some(experts),
            kv_heads: if shared > 0 { sizes.kv_heads } else { 4 },
            ..sizes
        }
    }

    const fn hybrid(
        hidden: usize,
        (heads, kv_heads): (usize, usize),
        (key_heads, value_heads): (usize, usize),
        intermediate: usize,
    ) -> LayersSizes {
        LayersSizes {
            hidden,
            heads,
            kv_heads,
            head_dim: 256,
            delta: Some(DeltaShape {
                key_heads,
                value_heads,
                key_dim: 128,
                value_dim: 128,
                conv: 4,
                tiled: false,
            }),
            experts: None,
            intermediate,
            trellis: false,
        }
    }

    #[test]
    fn published_models_fit() {
        let large = MODELS[5].intermediate;
        assert_eq!(large, 25_600);
        let kib = 1 << 10;
        // As many blocks as clusters take on an H200, and on devices with fewer multiprocessors; A100; RTX 3060 to 5090.
        for (capability, room, blocks) in [
            (Version::new(9, 0), 227 * kib, &[120, 104, 72][..]),
            (Version::new(8, 0), 163 * kib, &[108]),
            (Version::new(8, 6), 99 * kib, &[28, 82]),
            (Version::new(8, 9), 99 * kib, &[60, 128]),
            (Version::new(12, 0), 99 * kib, &[70, 170]),
        ] {
            let info = GpuInfo {
                capability,
                shared_memory: room,
                ..GpuInfo::default()
            };
            let cluster = cluster_of(capability);
            for (sizes, &blocks) in MODELS
                .iter()
                .flat_map(|m| blocks.iter().map(move |b| (m, b)))
            {
                let few = blocks < sizes.kv_heads.max(sizes.value_heads());
                assert_eq!(sizes.fit(blocks, cluster), !few, "{sizes:?} {blocks}");
                // INT4; 6 bits in groups of 32, the longest records of a mix.
                for record in [2048 + 160, 3072 + 160] {
                    let (wide, long) = (sizes.head_dim == 256, record > 3072);
                    // The inputs of large models, and the stages that keys of wide heads take, leave no room for others.
                    let lacks = match room / kib {
                        99 => wide || sizes.intermediate == large || long && sizes.hidden >= 4096,
                        163 => wide && long && sizes.hidden == 5120,
                        _ => false,
                    };
                    let shared = SharedMemory::of(&info, *sizes, TEAM * record, blocks);
                    assert_eq!(shared.is_none(), lacks, "{room}, {record}: {sizes:?}");
                    let Some(shared) = shared else { continue };
                    assert!(shared.bytes <= room, "{sizes:?}: {}", shared.bytes);
                    let window = if cluster == 1 { 0 } else { shared.window };
                    assert!(
                        shared.depth >= window + stages_ahead(sizes.head_dim),
                        "{sizes:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn each_block_has_records_to_add_up() {
        // 32 records of `down`.
        let small = sizes(256, 16, 512);
        assert!(small.fit(32, 8) && !small.fit(40, 8));
        // A tile of `down` with more parts than are read.
        let narrow = sizes(256, 16, 8192);
        assert!(narrow.fit(32, 8) && !narrow.fit(120, 8));
    }
}
