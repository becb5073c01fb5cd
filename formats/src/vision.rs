//! What a checkpoint says of the tower that sees images ([`nq_model::vision`]): `vision_config` of config.json, and
//! preprocessor_config.json.

use crate::error::{Error, Result};
use crate::files::{CONFIG, Files};
use crate::keys::PREPROCESSOR_UNUSED;
use crate::left_over::LeftOver;
use crate::object::Object;
use crate::store::{Overlay, WeightStore};
use crate::tensor::Tensor;
use crate::weight::Weight;
use nq_model::vision::{CHANNELS, ImageTokens, PATCH_EMBED, PixelSpec, VisionConfig};
use nq_model::{Dims, ModelConfig, tensor_name};
use serde_json::Value;

/// Name of the file with the sizes and values of images.
pub(crate) const PREPROCESSOR: &str = "preprocessor_config.json";

/// The object of config.json that describes the tower.
const TOWER: &str = "vision_config";

/// What nq does, for messages about other towers.
pub(crate) const TOWERS: &str = "nq runs the towers of Qwen3-VL, Qwen3.5, 3.6 and 3.8";

/// Where nothing is said.
const PIXELS: PixelSpec = PixelSpec::PUBLISHED;

/// More blocks of a tower are refused.
pub(crate) const MOST_BLOCKS: u64 = 1 << 10;

/// Images of more pixels are not made, whatever a file says.
const MOST_PIXELS: u64 = 1 << 26;

/// The tower of a model of shape `config`, if its files have one; what is left over is added to `left`.
///
/// # Errors
/// [`Error::Unsupported`], naming it, for what nq does not compute; [`Error::Malformed`] for missing, mistyped or
/// inconsistent keys.
pub(crate) fn read(
    files: &Files,
    config: &ModelConfig,
    store: &dyn WeightStore,
    left: &mut Vec<LeftOver>,
) -> Result<Option<VisionConfig>> {
    if config.architecture.also.is_empty() || !store.contains(PATCH_EMBED) {
        return Ok(None);
    }
    if config.hyper.is_some() {
        let why = "nq reads text alone with models whose residual has several streams";
        left.push(LeftOver::new("config.json: vision_config", why));
        return Ok(None);
    }
    let (path, json) = (files.path(CONFIG), files.require(CONFIG)?);
    let whole = Object::parse(&path, &json)?;
    let mut tokens = [0; 3];
    let keys = [
        "image_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
    ];
    for (token, key) in tokens.iter_mut().zip(keys) {
        let Some(id) = whole.token(key, config)? else {
            let why = "config.json has no such key, so that no token stands for images: the model reads text alone";
            left.push(LeftOver::new(key, why));
            return Ok(None);
        };
        *token = id;
    }
    let [pad, start, end] = tokens;
    let tokens = ImageTokens { pad, start, end };
    let Some(mut vision) = whole.object(TOWER, |o| o.tower(config, tokens))? else {
        let expected = "the shape of the tower whose tensors are there".into();
        return Err(whole.bad(TOWER, expected, "no such key".into()));
    };
    let check = |text: &Object<'_>| text.coordinates(config, &vision);
    if whole.object(crate::config::TEXT, check)?.is_none() {
        check(&whole)?;
    }
    let unknown = whole.left_over(CONFIG).into_iter();
    left.extend(unknown.filter(|l| l.name.contains(TOWER)));
    if let Some(json) = files.get(PREPROCESSOR)? {
        let path = files.path(PREPROCESSOR);
        let object = Object::parse(&path, &json)?;
        vision.pixels = object.pixels(&vision)?;
        left.extend(object.left_over_but(PREPROCESSOR, PREPROCESSOR_UNUSED));
    } else {
        let why = "there is no such file: images are brought to the published models' sizes";
        left.push(LeftOver::new(PREPROCESSOR, why));
    }
    let parameters = vision.parameters().into_iter();
    match parameters
        .map(|p| p.name)
        .find(|name| !store.contains(name))
    {
        None => Ok(Some(vision)),
        Some(absent) => Err(Error::Tensor {
            path: files.root(),
            tensor: tensor_name(&absent),
            expected: "every parameter of the tower that config.json describes".into(),
            found: "no such tensor".into(),
        }),
    }
}

impl Object<'_> {
    /// A token of the vocabulary, if there is one.
    fn token(&self, key: &str, config: &ModelConfig) -> Result<Option<u32>> {
        match self.u64(key)? {
            Some(id) if id >= config.vocab_size as u64 => {
                let expected = format!("a token below {}", config.vocab_size);
                Err(self.bad(key, expected, id.to_string()))
            }
            id => Ok(id.map(|id| id as u32)),
        }
    }

    /// A dimension of at most `most`.
    fn bounded(&self, key: &str, most: usize) -> Result<usize> {
        match self.dim(key)? {
            n if n <= most => Ok(n),
            n => Err(self.bad(key, format!("1 to {most}"), n.to_string())),
        }
    }

    /// Refuses another value than `expected`, if there is one.
    fn only(&self, key: &str, expected: impl Into<Value>, why: &str) -> Result<()> {
        let expected = expected.into();
        let same = |v: &Value| match expected.as_f64() {
            Some(number) => v.as_f64() == Some(number),
            None => *v == expected,
        };
        match self.get(key) {
            Some(value) if !same(value) => Err(self.unsupported(format!("{key} {value}"), why)),
            _ => Ok(()),
        }
    }

    /// The tower that this object describes.
    fn tower(&self, config: &ModelConfig, tokens: ImageTokens) -> Result<VisionConfig> {
        let kind = self.str("model_type")?;
        let known = |t: &String| ["qwen3_5", "qwen3_vl"].iter().any(|k| t.starts_with(k));
        if let Some(other) = kind.filter(|t| !known(t)) {
            let what = format!("vision_config of model_type {other}");
            return Err(self.unsupported(what, TOWERS));
        }
        self.only(
            "hidden_act",
            "gelu_pytorch_tanh",
            "blocks of towers have the GELU of tanh",
        )?;
        self.only("in_channels", 3, "images are red, green and blue")?;
        self.object("rope_parameters", |rope| {
            rope.only(
                "rope_theta",
                10_000,
                "rows and columns turn by a base of 10000",
            )?;
            rope.only(
                "rope_type",
                "axial",
                "heads of towers turn by row and column",
            )
        })?;
        let hidden = self.bounded("hidden_size", 1 << 16)?;
        let heads = self.bounded("num_heads", 1 << 10)?;
        // A half of a head turns by the row, a half by the column, each in pairs.
        if !hidden.is_multiple_of(4 * heads) {
            let expected = format!("a multiple of 4 times num_heads ({heads})");
            return Err(self.bad("vision_config.hidden_size", expected, hidden.to_string()));
        }
        let table = self.bounded("num_position_embeddings", 1 << 24)?;
        let side = table.isqrt();
        if side * side != table {
            let key = "vision_config.num_position_embeddings";
            return Err(self.bad(key, "a square".into(), table.to_string()));
        }
        let out = self.dim("out_hidden_size")?;
        if out != config.hidden_size {
            let expected = format!("the text model's hidden_size ({})", config.hidden_size);
            return Err(self.bad("vision_config.out_hidden_size", expected, out.to_string()));
        }
        let depth = self.bounded("depth", MOST_BLOCKS as usize)?;
        Ok(VisionConfig {
            depth,
            deepstack: self.deepstack(depth, config.num_hidden_layers)?,
            hidden_size: hidden,
            intermediate_size: self.bounded("intermediate_size", 1 << 18)?,
            num_heads: heads,
            patch_size: self.bounded("patch_size", 64)?,
            temporal_patch_size: self.bounded("temporal_patch_size", 8)?,
            spatial_merge_size: self.bounded("spatial_merge_size", 8)?,
            position_side: side,
            out_hidden_size: out,
            tokens,
            pixels: PIXELS,
        })
    }

    /// The blocks behind which mergers make rows for the first of the text model's `layers`.
    fn deepstack(&self, depth: usize, layers: usize) -> Result<Vec<usize>> {
        let read = |v: &Value| -> Option<Vec<usize>> {
            let blocks = v
                .as_array()?
                .iter()
                .map(|n| usize::try_from(n.as_u64()?).ok());
            let blocks: Vec<usize> = blocks.collect::<Option<_>>()?;
            let fits = blocks.is_sorted_by(|a, b| a < b) && blocks.last() < Some(&depth);
            (fits && blocks.len() <= layers).then_some(blocks)
        };
        let expected = format!("blocks below {depth} in order, no more than {layers} layers");
        let blocks = self.typed("deepstack_visual_indexes", &expected, read)?;
        Ok(blocks.unwrap_or_default())
    }

    /// Refuses frequencies of this text model that do not follow the three coordinates of a position in turn. Where
    /// nothing is said, each has a third, as in Qwen3.5; Qwen3-VL has other shares.
    fn coordinates(&self, config: &ModelConfig, tower: &VisionConfig) -> Result<()> {
        const SECTION: &str = "mrope_section";
        let why = "the frequencies of positions follow time, row and column in turn";
        let in_turn = |o: &Object<'_>| {
            o.only("mrope_interleaved", true, why)?;
            Ok(o.get(SECTION).is_some())
        };
        let said = [
            self.object("rope_parameters", in_turn)?,
            self.object("rope_scaling", in_turn)?,
        ];
        let pairs = config.rotary_dims() / 2;
        match config.rope.sections {
            None if !tower.deepstack.is_empty() && !said.contains(&Some(true)) => {
                let expected = "the shares of time, row and column".into();
                Err(self.bad(SECTION, expected, "no such key".into()))
            }
            Some(found) if found.iter().sum::<usize>() != pairs => {
                let expected = format!("three numbers whose sum is {pairs}");
                Err(self.bad(SECTION, expected, format!("{found:?}")))
            }
            _ => Ok(()),
        }
    }

    /// What a preprocessor_config.json says of the images of `tower`.
    fn pixels(&self, tower: &VisionConfig) -> Result<PixelSpec> {
        for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
            self.only(key, true, "images are resized, and their values normalized")?;
        }
        self.only("resample", 3, "images are resized bicubically")?;
        if let Some(factor) = self
            .f64("rescale_factor")?
            .filter(|f| (f * 255.0 - 1.0).abs() > 1e-6)
        {
            let what = format!("rescale_factor {factor}");
            return Err(self.unsupported(what, "values of 8 bits become 0 to 1"));
        }
        for (key, expected) in [
            ("patch_size", tower.patch_size),
            ("temporal_patch_size", tower.temporal_patch_size),
            ("merge_size", tower.spatial_merge_size),
        ] {
            if let Some(found) = self.u64(key)?.filter(|n| *n != expected as u64) {
                let expected = format!("{expected}, as config.json says");
                return Err(self.bad(key, expected, found.to_string()));
            }
        }
        // The edges are numbers of pixels of the whole image; older files name them otherwise.
        let size = self.object("size", |s| {
            Ok([s.u64("shortest_edge")?, s.u64("longest_edge")?])
        })?;
        let [shortest, longest] = size.unwrap_or_default();
        let least = shortest.or(self.u64("min_pixels")?).unwrap_or(PIXELS.least);
        let most = longest.or(self.u64("max_pixels")?).unwrap_or(PIXELS.most);
        let smallest = (tower.patch_size * tower.spatial_merge_size).pow(2) as u64;
        if !(least <= most && (smallest..=MOST_PIXELS).contains(&most)) {
            let expected =
                format!("{smallest} to {MOST_PIXELS} pixels, and no fewer than the least");
            return Err(self.bad("size", expected, format!("{least} to {most}")));
        }
        let channels = |key: &str, lowest: f64, otherwise: [f32; CHANNELS]| {
            let read = |v: &Value| -> Option<[f32; CHANNELS]> {
                let values = v.as_array()?.iter().map(|v| v.as_f64());
                let values: Option<Vec<f32>> = values
                    .map(|v| v.filter(|v| *v >= lowest && *v <= 1e3).map(|v| v as f32))
                    .collect();
                values?.try_into().ok()
            };
            let expected = format!("three numbers, {lowest} to 1000");
            Ok::<_, Error>(self.typed(key, &expected, read)?.unwrap_or(otherwise))
        };
        Ok(PixelSpec {
            least,
            most,
            mean: channels("image_mean", -1e3, PIXELS.mean)?,
            std: channels("image_std", 1e-6, PIXELS.std)?,
        })
    }
}

/// A store in which the Linear that reads patches is a matrix: other programs keep it as a convolution over frames, rows
/// and columns.
pub(crate) struct PatchMatrix {
    inner: Box<dyn WeightStore>,
    shape: [usize; 5], // [hidden, channels, temporal, patch, patch]
}

impl PatchMatrix {
    pub(crate) fn over(inner: Box<dyn WeightStore>, c: &VisionConfig) -> Box<dyn WeightStore> {
        Box::new(PatchMatrix {
            inner,
            shape: c.patch_kernel(),
        })
    }
}

impl Overlay for PatchMatrix {
    fn inner(&self) -> &dyn WeightStore {
        self.inner.as_ref()
    }

    fn matrix(&self, name: &str, dims: Dims) -> Result<Weight> {
        let stored = tensor_name(PATCH_EMBED);
        let is_kernel = |e: &crate::TensorEntry| e.name == stored && e.shape == self.shape;
        if name != PATCH_EMBED || !self.inner.entries().iter().any(is_kernel) {
            return self.inner.matrix(name, dims);
        }
        match self.inner.tensor(&stored, &self.shape)? {
            None => self.inner.matrix(name, dims),
            Some(kernel) => {
                let (rows, cols) = dims.pair();
                let matrix = Tensor::new(kernel.dtype(), vec![rows, cols], kernel.data().clone())?;
                Ok(Weight::Dense(matrix))
            }
        }
    }

    fn scheme_in_levels(&self, name: &str) -> Option<crate::Scheme> {
        match name {
            PATCH_EMBED => Overlay::scheme(self, name),
            _ => self.inner.scheme_in_levels(name),
        }
    }

    fn matrix_in_codes(&self, name: &str, dims: Dims) -> Result<Weight> {
        match name {
            PATCH_EMBED => Overlay::matrix(self, name, dims),
            _ => self.inner.matrix_in_codes(name, dims),
        }
    }

    fn stored(&self, name: &str, dims: Dims) -> Result<crate::StoredWeight> {
        match name {
            PATCH_EMBED => Overlay::matrix(self, name, dims).map(crate::StoredWeight::Canonical),
            _ => self.inner.stored(name, dims),
        }
    }

    fn gguf_file(&self) -> Option<&std::path::Path> {
        self.inner.gguf_file()
    }
}
