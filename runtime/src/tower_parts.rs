//! The parameters of a tower ([`nq_model::vision`]), as a device holds them.

use crate::error::Result;
use nq_formats::{Progress, Unit};
use nq_model::Dims;
use nq_model::vision::{PATCH_EMBED, TOWER, VisionConfig};

/// A Linear `L` with the bias `V` of its outputs.
pub struct BiasedLinear<L, V> {
    /// The Linear.
    pub linear: L,
    /// `[out]`
    pub bias: V,
}

/// The parameters of a norm that subtracts the mean.
pub struct LayerNormParts<V> {
    /// `[width]`
    pub gains: V,
    /// `[width]`
    pub bias: V,
}

/// Makes one row of the text model's width of neighbours, which are consecutive.
pub struct TowerMerger<L, V> {
    /// Of a patch, or of neighbours side by side.
    pub norm: LayerNormParts<V>,
    /// `[merged hidden, merged hidden]`
    pub up: BiasedLinear<L, V>,
    /// `[out hidden, merged hidden]`
    pub down: BiasedLinear<L, V>,
}

/// A block of a tower.
pub struct TowerBlock<L, V> {
    /// Before attention.
    pub attention_norm: LayerNormParts<V>,
    /// `[3 hidden, hidden]`
    pub qkv: BiasedLinear<L, V>,
    /// `[hidden, hidden]`
    pub out: BiasedLinear<L, V>,
    /// Before the MLP.
    pub mlp_norm: LayerNormParts<V>,
    /// `[intermediate, hidden]`
    pub up: BiasedLinear<L, V>,
    /// `[hidden, intermediate]`
    pub down: BiasedLinear<L, V>,
}

/// All parameters of a tower but its table of positions.
pub struct TowerParts<L, V> {
    /// `[hidden, patch values]`
    pub patch_embed: BiasedLinear<L, V>,
    /// The blocks, in order.
    pub blocks: Vec<TowerBlock<L, V>>,
    /// Behind the last block.
    pub merger: TowerMerger<L, V>,
    /// Behind the blocks that the shape names.
    pub deepstack: Vec<TowerMerger<L, V>>,
}

/// Reads parameters to where they are held, by their names with [`TOWER`].
pub trait TowerReader {
    /// A Linear on the device.
    type Linear;
    /// A vector on the device.
    type Vector;

    /// The Linear `name` of shape `dims`, which profiles list as `listed`.
    ///
    /// # Errors
    /// A missing or misshapen tensor; errors of the device.
    fn linear(&mut self, name: &str, dims: Dims, listed: &'static str) -> Result<Self::Linear>;

    /// The vector `name` of length `len`.
    ///
    /// # Errors
    /// As of [`TowerReader::linear`].
    fn vector(&mut self, name: &str, len: usize) -> Result<Self::Vector>;
}

impl<L, V> TowerParts<L, V> {
    /// Reads the parameters of a tower of shape `c`.
    ///
    /// # Errors
    /// Errors of `from`.
    pub fn read(
        c: &VisionConfig,
        from: &mut impl TowerReader<Linear = L, Vector = V>,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let (h, wide, merged) = (
            c.hidden_size,
            c.intermediate_size,
            c.merged() * c.hidden_size,
        );
        progress.begin("loading the tower", c.depth as u64, Unit::Items);
        let block = |i: usize| -> Result<TowerBlock<L, V>> {
            let name = |suffix: &str| format!("{TOWER}blocks.{i}.{suffix}");
            let block = TowerBlock {
                attention_norm: norm(from, &name("norm1"), h)?,
                qkv: biased(from, &name("attn.qkv"), Dims::new(3 * h, h), "tower qkv")?,
                out: biased(from, &name("attn.proj"), Dims::new(h, h), "tower out")?,
                mlp_norm: norm(from, &name("norm2"), h)?,
                up: biased(
                    from,
                    &name("mlp.linear_fc1"),
                    Dims::new(wide, h),
                    "tower up",
                )?,
                down: biased(
                    from,
                    &name("mlp.linear_fc2"),
                    Dims::new(h, wide),
                    "tower down",
                )?,
            };
            progress.advance(1);
            Ok(block)
        };
        let blocks = (0..c.depth).map(block).collect::<Result<_>>()?;
        progress.end();
        let mut merger = |prefix: &str, width: usize| -> Result<TowerMerger<L, V>> {
            let name = |suffix: &str| format!("{TOWER}{prefix}.{suffix}");
            let (up, down) = (
                Dims::new(merged, merged),
                Dims::new(c.out_hidden_size, merged),
            );
            Ok(TowerMerger {
                norm: norm(from, &name("norm"), width)?,
                up: biased(from, &name("linear_fc1"), up, "tower merge")?,
                down: biased(from, &name("linear_fc2"), down, "tower merge")?,
            })
        };
        let last = merger("merger", h)?;
        let deepstack = |i: usize| merger(&format!("deepstack_merger_list.{i}"), merged);
        let deepstack = (0..c.deepstack.len())
            .map(deepstack)
            .collect::<Result<_>>()?;
        let dims = Dims::new(h, c.patch_values());
        Ok(TowerParts {
            patch_embed: biased(from, PATCH_EMBED, dims, "tower patches")?,
            blocks,
            merger: last,
            deepstack,
        })
    }
}

fn biased<R: TowerReader>(
    from: &mut R,
    name: &str,
    dims: Dims,
    listed: &'static str,
) -> Result<BiasedLinear<R::Linear, R::Vector>> {
    Ok(BiasedLinear {
        linear: from.linear(name, dims, listed)?,
        bias: from.vector(&format!("{name}.bias"), dims.rows)?,
    })
}

fn norm<R: TowerReader>(from: &mut R, name: &str, len: usize) -> Result<LayerNormParts<R::Vector>> {
    Ok(LayerNormParts {
        gains: from.vector(name, len)?,
        bias: from.vector(&format!("{name}.bias"), len)?,
    })
}
