//! Images of a chat: what is read of a file before it is decoded, and the rows that a tower makes of it, which are kept
//! because agents and chats send every image again in each turn.

use crate::error::{Error, Result};
use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use nq_model::vision::{Grid, VisionConfig};
use nq_pictures::Limits;
use nq_runtime::chat_template::image_part;
use nq_runtime::{ImageRows, Message, PlacedImage, Tower};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Base64 with padding or without.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The bytes that a text in base64 stands for; it may be broken into lines.
///
/// # Errors
/// What is wrong with it.
pub fn from_base64(text: &str) -> std::result::Result<Vec<u8>, String> {
    let decoded = match text.contains(['\n', '\r']) {
        true => BASE64.decode(text.replace(['\n', '\r'], "")),
        false => BASE64.decode(text),
    };
    decoded.map_err(|e| format!("expected base64: {e}"))
}

/// The bytes in a `data:` URL; `None` for another URL.
///
/// # Errors
/// What is wrong with it.
pub fn from_data_url(url: &str) -> Option<std::result::Result<Vec<u8>, String>> {
    let data = url.strip_prefix("data:")?;
    Some(match data.split_once(";base64,") {
        Some((_, data)) => from_base64(data),
        None => Err("expected data:image/...;base64,...".into()),
    })
}

/// A user's message of images, given as the bytes of their files, and a text. It holds the images as messages of
/// OpenAI's chats do.
///
/// # Errors
/// [`Error::Image`] for bytes that are no image.
pub fn message_with_images(images: &[impl AsRef<[u8]>], text: &str) -> Result<Message> {
    if images.is_empty() {
        return Ok(Message::new("user", text));
    }
    let mut parts: Vec<Value> = Vec::with_capacity(images.len() + 1);
    for image in images {
        let kind = nq_pictures::header(image.as_ref(), &Limits::default())?.format;
        let url = format!("data:{};base64,{}", kind.media_type(), BASE64.encode(image));
        parts.push(json!({"type": "image_url", "image_url": {"url": url}}));
    }
    parts.push(json!({"type": "text", "text": text}));
    Ok(Message {
        role: "user".into(),
        content: parts.into(),
        extra: Map::new(),
    })
}

/// Takes the images out of messages as [`message_with_images`] makes them and leaves what templates read: for a model
/// called `name`, which sees by `sight`.
///
/// # Errors
/// [`Error::Blind`] for a model that reads text alone; images that are no images, or exceed limits.
pub fn taken(sight: Option<&Sight>, name: &str, messages: &mut [Message]) -> Result<Vec<Image>> {
    let mut images = Vec::new();
    let lists = messages.iter_mut().filter_map(|m| m.content.as_array_mut());
    for part in lists.flatten().filter(|part| part["type"] == "image_url") {
        let url = part["image_url"]["url"].as_str().unwrap_or_default();
        let bytes = from_data_url(url).unwrap_or_else(|| Err("expected a data: URL".into()));
        let bytes = bytes.map_err(Error::NoImage)?;
        let sight = sight.ok_or_else(|| Error::Blind(name.to_owned()))?;
        images.push(sight.image(bytes, None)?);
        *part = image_part();
    }
    Ok(images)
}

/// Time in which an image is decoded at most.
const MOST_TIME: Duration = Duration::from_secs(20);

/// What images may take.
#[derive(Clone, Copy, Debug)]
pub struct SightOptions {
    /// Bytes and pixels of a file.
    pub limits: Limits,
    /// Tokens of an image at most: larger ones are made smaller.
    pub tokens: u64,
    /// Bytes of rows that are kept.
    pub kept: usize,
}

impl Default for SightOptions {
    /// 4,096 tokens, which is 2,048 by 2,048 pixels of the published models, and 256 MB.
    fn default() -> Self {
        SightOptions {
            limits: Limits::default(),
            tokens: 4096,
            kept: 256_000_000,
        }
    }
}

/// Loads a tower.
type OpenTower = dyn Fn() -> nq_runtime::Result<Arc<dyn Tower>> + Send + Sync;

/// How a model sees: its tower, which is loaded for the first image, and the rows of images that it saw lately.
pub struct Sight {
    config: VisionConfig,
    options: SightOptions,
    open: Box<OpenTower>,
    /// One image is decoded at a time, so that memory is bounded.
    decoding: Mutex<()>,
    /// One image is encoded at a time: a tower uses all threads.
    tower: Mutex<Option<Arc<dyn Tower>>>,
    kept: Mutex<EncodedImages>,
}

/// An image whose header was read.
#[derive(Clone, Debug)]
pub struct Image {
    bytes: Arc<[u8]>,
    most: u64,
    pixels: u64,
    tokens: usize,
    key: [u8; 32],
}

impl Image {
    /// Tokens of a prompt that it takes.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Pixels of its file.
    pub fn pixels(&self) -> u64 {
        self.pixels
    }

    /// The bytes of its file.
    pub fn bytes(&self) -> &Arc<[u8]> {
        &self.bytes
    }
}

/// Rows by the file and the size that they were made of.
#[derive(Default)]
struct EncodedImages {
    rows: HashMap<[u8; 32], (Arc<ImageRows>, u64)>,
    bytes: usize,
    clock: u64,
}

impl EncodedImages {
    fn get(&mut self, key: &[u8; 32]) -> Option<Arc<ImageRows>> {
        self.clock += 1;
        let (rows, used) = self.rows.get_mut(key)?;
        *used = self.clock;
        Some(Arc::clone(rows))
    }

    fn put(&mut self, key: [u8; 32], rows: &Arc<ImageRows>, most: usize) {
        let size = |rows: &ImageRows| size_of_val(rows.rows.as_slice());
        self.clock += 1;
        self.bytes += size(rows);
        let entry = (Arc::clone(rows), self.clock);
        if let Some((before, _)) = self.rows.insert(key, entry) {
            self.bytes -= size(&before);
        }
        while self.bytes > most {
            let oldest = self.rows.iter().min_by_key(|(_, (_, used))| *used);
            let Some((rows, _)) = oldest
                .map(|(key, _)| *key)
                .and_then(|k| self.rows.remove(&k))
            else {
                return;
            };
            self.bytes -= size(&rows);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sight {
    /// Sees by a tower of shape `config` that `open` loads, as `options` allow.
    pub fn new(
        config: VisionConfig,
        options: SightOptions,
        open: impl Fn() -> nq_runtime::Result<Arc<dyn Tower>> + Send + Sync + 'static,
    ) -> Self {
        Sight {
            config,
            options,
            open: Box::new(open),
            decoding: Mutex::default(),
            tower: Mutex::default(),
            kept: Mutex::default(),
        }
    }

    /// Loads the tower, unless that has been done.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn load(&self) -> Result<()> {
        self.loaded(&mut locked(&self.tower)).map(|_| ())
    }

    fn loaded(&self, tower: &mut Option<Arc<dyn Tower>>) -> Result<Arc<dyn Tower>> {
        let there = match tower {
            Some(there) => there,
            None => tower.insert((self.open)()?),
        };
        Ok(Arc::clone(there))
    }

    /// The shape of its tower.
    pub fn config(&self) -> &VisionConfig {
        &self.config
    }

    /// What it allows.
    pub fn options(&self) -> &SightOptions {
        &self.options
    }

    /// The image in `bytes`, in `most` tokens at most; no pixel is decoded.
    ///
    /// # Errors
    /// [`crate::Error::Image`] for what is no image, or exceeds the limits.
    pub fn image(&self, bytes: impl Into<Arc<[u8]>>, most: Option<u64>) -> Result<Image> {
        let bytes = bytes.into();
        let most = most.unwrap_or(u64::MAX).min(self.options.tokens);
        let header = nq_pictures::header(&bytes, &self.options.limits)?;
        let grid: Grid = nq_pictures::grid(&header, &self.config, most);
        Ok(Image {
            tokens: grid.tokens(self.config.spatial_merge_size),
            key: nq_pictures::key(&bytes, grid),
            pixels: u64::from(header.width) * u64::from(header.height),
            most,
            bytes,
        })
    }

    /// The rows of an image: kept ones, or those that the tower makes now. `stop` ends decoding and encoding.
    ///
    /// # Errors
    /// [`crate::Error::Image`] for a file that cannot be decoded, or not in time; errors of the tower.
    pub fn rows(&self, image: &Image, stop: &dyn Fn() -> bool) -> Result<Arc<ImageRows>> {
        if let Some(rows) = locked(&self.kept).get(&image.key) {
            return Ok(rows);
        }
        let decoding = locked(&self.decoding);
        let begun = Instant::now();
        let late = || stop() || begun.elapsed() > MOST_TIME;
        let (config, limits) = (&self.config, &self.options.limits);
        let patches = nq_pictures::patches(&image.bytes, config, image.most, limits, &late)?;
        drop(decoding);
        let mut tower = locked(&self.tower);
        // Another request may have brought the same one.
        if let Some(rows) = locked(&self.kept).get(&image.key) {
            return Ok(rows);
        }
        if stop() {
            return Err(nq_pictures::Error::Stopped.into());
        }
        let made = self.loaded(&mut tower)?.encode_until(&patches, stop);
        let rows = match made {
            Err(nq_runtime::Error::Interrupted) => return Err(nq_pictures::Error::Stopped.into()),
            made => Arc::new(made?),
        };
        locked(&self.kept).put(image.key, &rows, self.options.kept);
        Ok(rows)
    }

    /// The rows of `images` at their `places` in a prompt.
    ///
    /// # Errors
    /// Errors of [`Sight::rows`].
    pub fn placed(
        &self,
        images: &[Image],
        places: &[usize],
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<PlacedImage>> {
        let both = images.iter().zip(places);
        let placed = both.map(|(image, &at)| {
            let image = self.rows(image, stop)?;
            Ok(PlacedImage { at, image })
        });
        placed.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(values: usize) -> Arc<ImageRows> {
        Arc::new(ImageRows {
            rows: vec![0.0; values],
            height: 1,
            width: values,
            digest: [0; 32],
        })
    }

    #[test]
    fn the_least_recently_used_rows_make_room() {
        let mut kept = EncodedImages::default();
        let key = |n| [n; 32];
        (1..=3).for_each(|n| kept.put(key(n), &rows(10), 120));
        assert!(kept.get(&key(1)).is_some());
        kept.put(key(4), &rows(10), 120);
        assert!(kept.get(&key(2)).is_none());
        assert!(kept.get(&key(1)).is_some() && kept.get(&key(4)).is_some());
        assert_eq!(kept.bytes, 120);
        // One that alone is too large is not kept, and nothing else is either.
        kept.put(key(5), &rows(100), 120);
        assert_eq!((kept.rows.len(), kept.bytes), (0, 0));
    }
}
