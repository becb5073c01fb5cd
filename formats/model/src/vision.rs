//! Models that see: the shape of the tower that makes rows of vectors of an image, the names of its parameters, and
//! what goes in.
//!
//! A tower is a transformer without a causal mask over the patches of an image, as transformers' `qwen3_5` has it:
//!
//! 1. rows of patches by `patch_embed`, and the position of each in a square table, interpolated;
//! 2. blocks: LayerNorm, attention over the whole image with heads turned by row and column, LayerNorm, an MLP with
//!    GELU;
//! 3. the merger: neighbours of `merge * merge` patches side by side become one row of the text model's width;
//! 4. in Qwen3-VL, mergers of the rows behind some blocks, for the text model's first layers ("deepstack").

use crate::{Preset, Shape};

/// Prefix of the names of a tower's parameters.
pub const TOWER: &str = "model.visual.";

/// The Linear `[hidden, channels temporal patch patch]` that reads patches.
pub const PATCH_EMBED: &str = "model.visual.patch_embed.proj";

/// The table of positions `[side side, hidden]`.
pub const POSITIONS: &str = "model.visual.pos_embed";

/// Values of a pixel: red, green and blue.
pub const CHANNELS: usize = 3;

/// The shape of a tower, and of the images that it takes. Dimensions are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Number of blocks.
    pub depth: usize,
    /// Width of a row in the blocks.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Heads of attention, which divide `hidden_size`.
    pub num_heads: usize,
    /// Pixels of a side of a patch.
    pub patch_size: usize,
    /// Frames of a patch; an image is repeated for all of them.
    pub temporal_patch_size: usize,
    /// Patches of a side of what becomes one row for the text model.
    pub spatial_merge_size: usize,
    /// Rows and columns of the table of positions.
    pub position_side: usize,
    /// Blocks, in order, behind which a merger of its own makes rows: those of the first are added to the text model's
    /// stream behind its first layer, those of the next behind its second.
    pub deepstack: Vec<usize>,
    /// Width of the rows that come out: that of the text model's stream.
    pub out_hidden_size: usize,
    /// The tokens around and in place of images.
    pub tokens: ImageTokens,
    /// The sizes and values of images.
    pub pixels: PixelSpec,
}

/// The tokens that stand for images in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageTokens {
    /// Stands once for each row that the tower makes.
    pub pad: u32,
    /// Before an image's first row.
    pub start: u32,
    /// Behind its last row.
    pub end: u32,
}

/// The sizes and values that images are brought to before they are cut into patches (`preprocessor_config.json`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PixelSpec {
    /// Pixels of an image at least; smaller ones are enlarged.
    pub least: u64,
    /// Pixels of an image at most; larger ones are made smaller.
    pub most: u64,
    /// Subtracted from red, green and blue, which are 0 to 1.
    pub mean: [f32; CHANNELS],
    /// What the differences are divided by.
    pub std: [f32; CHANNELS],
}

impl PixelSpec {
    /// What the published models of Qwen3.5 and its successors have.
    pub const PUBLISHED: PixelSpec = PixelSpec {
        least: 1 << 16,
        most: 1 << 24,
        mean: [0.5; CHANNELS],
        std: [0.5; CHANNELS],
    };
}

impl Preset {
    /// The tower of the published model; `None` for one that reads text alone.
    pub fn vision(&self) -> Option<VisionConfig> {
        if !self.architecture.model_type.starts_with("qwen3_5") {
            return None;
        }
        let [depth, hidden_size, intermediate_size, num_heads] = match (self.experts, self.hidden) {
            (None, 1024) => [12, 768, 3072, 12],
            (None, 2048 | 2560) => [24, 1024, 4096, 16],
            _ => [27, 1152, 4304, 16],
        };
        Some(VisionConfig {
            depth,
            hidden_size,
            intermediate_size,
            num_heads,
            patch_size: 16,
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            position_side: 48,
            deepstack: Vec::new(),
            out_hidden_size: self.hidden,
            tokens: ImageTokens {
                pad: 248_056,
                start: 248_053,
                end: 248_054,
            },
            pixels: PixelSpec::PUBLISHED,
        })
    }
}

/// Patches of an image: frames, rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Groups of [`VisionConfig::temporal_patch_size`] frames: 1 for an image.
    pub t: usize,
    /// Rows.
    pub h: usize,
    /// Columns.
    pub w: usize,
}

/// The pixels of an image as a tower takes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    /// How many there are; rows and columns are multiples of [`VisionConfig::spatial_merge_size`].
    pub grid: Grid,
    /// `[t h w][channels temporal patch patch]`: frame by frame, and in it the squares of patches that are merged, row
    /// by row; within a square its patches row by row. Transformers' `pixel_values`.
    pub rows: Vec<f32>,
    /// SHA-256 of what the tower sees: images with one digest have the same rows.
    pub digest: [u8; 32],
}

impl Grid {
    /// Number of patches.
    pub fn patches(&self) -> usize {
        self.t * self.h * self.w
    }

    /// Rows that the tower makes of them, if squares of `merge` by `merge` become one.
    pub fn tokens(&self, merge: usize) -> usize {
        self.patches() / (merge * merge)
    }

    /// Row and column of each patch of a frame, in the order of [`Patches::rows`].
    pub fn places(&self, merge: usize) -> impl Iterator<Item = (usize, usize)> {
        let (h, w) = (self.h, self.w);
        let squares = (0..h / merge).flat_map(move |y| (0..w / merge).map(move |x| (y, x)));
        squares.flat_map(move |(y, x)| {
            let within = (0..merge).flat_map(move |i| (0..merge).map(move |j| (i, j)));
            within.map(move |(i, j)| (y * merge + i, x * merge + j))
        })
    }
}

impl VisionConfig {
    /// Values of a patch.
    pub fn patch_values(&self) -> usize {
        CHANNELS * self.temporal_patch_size * self.patch_size * self.patch_size
    }

    /// The shape of the convolution `[hidden, channels, temporal, patch, patch]` as which published files keep
    /// [`PATCH_EMBED`].
    pub fn patch_kernel(&self) -> [usize; 5] {
        let (frames, side) = (self.temporal_patch_size, self.patch_size);
        [self.hidden_size, CHANNELS, frames, side, side]
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Patches that become one row for the text model.
    pub fn merged(&self) -> usize {
        self.spatial_merge_size * self.spatial_merge_size
    }

    /// Rows of the text model at most that an image becomes.
    pub fn most_tokens(&self) -> u64 {
        let side = (self.patch_size * self.spatial_merge_size) as u64;
        self.pixels.most / (side * side)
    }

    /// Every parameter of the tower, in the order they are used. Linears and norms of a tower all have biases.
    pub fn parameters(&self) -> Vec<TowerParameter> {
        let mut all = vec![
            TowerParameter {
                name: PATCH_EMBED.into(),
                shape: Shape::Matrix(self.hidden_size, self.patch_values()),
            },
            TowerParameter {
                name: format!("{PATCH_EMBED}.bias"),
                shape: Shape::Vector(self.hidden_size),
            },
            TowerParameter {
                name: POSITIONS.into(),
                shape: Shape::Matrix(self.position_side.pow(2), self.hidden_size),
            },
        ];
        for block in 0..self.depth {
            let prefix = format!("blocks.{block}.");
            (BLOCK.iter()).for_each(|row| row.push(self, &prefix, &mut all));
        }
        (MERGER.iter()).for_each(|row| row.push(self, "merger.", &mut all));
        for place in 0..self.deepstack.len() {
            let prefix = format!("deepstack_merger_list.{place}.");
            (DEEPSTACK.iter()).for_each(|row| row.push(self, &prefix, &mut all));
        }
        all
    }
}

/// A parameter of a tower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TowerParameter {
    /// Its Hugging Face name.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
}

/// A Linear or a norm of a tower, which has a weight and a bias.
struct TowerRow {
    suffix: &'static str,
    gguf: &'static str,
    shape: fn(&VisionConfig) -> Shape,
}

impl TowerRow {
    fn push(&self, c: &VisionConfig, prefix: &str, all: &mut Vec<TowerParameter>) {
        let weight = TowerParameter {
            name: format!("{TOWER}{prefix}{}", self.suffix),
            shape: (self.shape)(c),
        };
        let outputs = match weight.shape {
            Shape::Vector(n) | Shape::Matrix(n, _) => n,
        };
        let bias = TowerParameter {
            name: format!("{}.bias", weight.name),
            shape: Shape::Vector(outputs),
        };
        all.extend([weight, bias]);
    }
}

const fn row(
    suffix: &'static str,
    gguf: &'static str,
    shape: fn(&VisionConfig) -> Shape,
) -> TowerRow {
    TowerRow {
        suffix,
        gguf,
        shape,
    }
}

/// The parameters of a block, in the order they are used.
#[rustfmt::skip]
const BLOCK: [TowerRow; 6] = [
    row("norm1", "ln1", |c| Shape::Vector(c.hidden_size)),
    row("attn.qkv", "attn_qkv", |c| Shape::Matrix(3 * c.hidden_size, c.hidden_size)),
    row("attn.proj", "attn_out", |c| Shape::Matrix(c.hidden_size, c.hidden_size)),
    row("norm2", "ln2", |c| Shape::Vector(c.hidden_size)),
    row("mlp.linear_fc1", "ffn_up", |c| Shape::Matrix(c.intermediate_size, c.hidden_size)),
    row("mlp.linear_fc2", "ffn_down", |c| Shape::Matrix(c.hidden_size, c.intermediate_size)),
];

/// The parameters of the merger.
#[rustfmt::skip]
const MERGER: [TowerRow; 3] = [
    row("norm", "v.post_ln", |c| Shape::Vector(c.hidden_size)),
    row("linear_fc1", "mm.0", |c| Shape::Matrix(c.merged() * c.hidden_size, c.merged() * c.hidden_size)),
    row("linear_fc2", "mm.2", |c| Shape::Matrix(c.out_hidden_size, c.merged() * c.hidden_size)),
];

/// The parameters of a merger behind a block, whose norm is over neighbours side by side.
#[rustfmt::skip]
const DEEPSTACK: [TowerRow; 3] = [
    row("norm", "norm", |c| Shape::Vector(c.merged() * c.hidden_size)),
    row("linear_fc1", "fc1", MERGER[1].shape),
    row("linear_fc2", "fc2", MERGER[2].shape),
];

/// The name, without `.weight`, that the parameter `name` of a tower has in an `mmproj` GGUF file; `None` for another.
/// `deepstack` is [`VisionConfig::deepstack`].
pub fn gguf_name(name: &str, deepstack: &[usize]) -> Option<String> {
    if name == POSITIONS {
        return Some("v.position_embd".into());
    }
    let within = name.strip_prefix(TOWER)?;
    let (row, bias) = match within.strip_suffix(".bias") {
        Some(row) => (row, ".bias"),
        None => (within, ""),
    };
    let named = |rows: &[TowerRow], suffix: &str| {
        let row = rows.iter().find(|row| row.suffix == suffix)?;
        Some(row.gguf)
    };
    let (prefix, gguf) = match (row.split_once('.')?, row) {
        (_, "patch_embed.proj") => (String::new(), "v.patch_embd"),
        (("merger", suffix), _) => (String::new(), named(&MERGER, suffix)?),
        (("blocks", rest), _) => {
            let (block, suffix) = rest.split_once('.')?;
            let block: usize = block.parse().ok()?;
            (format!("v.blk.{block}."), named(&BLOCK, suffix)?)
        }
        (("deepstack_merger_list", rest), _) => {
            let (place, suffix) = rest.split_once('.')?;
            let block = deepstack.get(place.parse::<usize>().ok()?)?;
            (format!("v.deepstack.{block}."), named(&DEEPSTACK, suffix)?)
        }
        _ => return None,
    };
    Some(format!("{prefix}{gguf}{bias}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_that_are_merged_are_neighbours() {
        let grid = Grid { t: 1, h: 2, w: 4 };
        let places: Vec<_> = grid.places(2).collect();
        let first = [(0, 0), (0, 1), (1, 0), (1, 1)];
        assert_eq!(places[..4], first);
        assert_eq!(places[4..], first.map(|(y, x)| (y, x + 2)));
        assert_eq!((grid.patches(), grid.tokens(2)), (8, 2));
    }
}
