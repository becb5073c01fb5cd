//! Which files of a model fit a machine, and what they reach there: memory by the plans of loading and serving, speed
//! computed from bandwidth and records ([`speed`]), quality from records.

pub(crate) mod cards;
pub(crate) mod speed;

use nq_cpu::plan::{self, WeightSource};
use nq_formats::trellis::Code;
use nq_formats::{Bits, Checkpoint, human_bytes};
use nq_kernels::pages::PAGE;
use nq_kernels::registry::WeightKind;
use nq_load::gpu;
use nq_model::{DType, ModelConfig};
use nq_quantize::{Codes, Recipe};
use nq_runtime::interface::Placed;
use nq_runtime::weights::weight_kinds;
use nq_runtime::{DeviceMemory, DraftedBy, Error, KvType, SessionSpec};
use nq_serve::room::{self, ServedSession, Wanted};
use serde::Serialize;
use speed::{Computed, Cores, Kernels};

/// Bytes of a GPU's memory that its driver takes, as docs/cards.md says.
pub(crate) const DRIVER: u64 = 800_000_000;

/// Seconds that a layer whose experts are on the CPU takes at least: 0.39 ms of each of 48
/// (2026-11-23-gpu-mixture.csv).
const HOST_LAYER: f64 = 0.39e-3;

/// Tokens a second of one conversation that are enough to read along.
const ENOUGH: f64 = 20.0;
/// KL divergence, in nats, that nobody notices: the best token is another one in 1 of 100 places.
const UNNOTICED: f64 = 1e-3;
/// KL divergence, in nats, that is worth some speed where every file is slow: about that of 4 bits on the demo model.
const FAIR: f64 = 0.03;

/// How a figure is known, in the words of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Known {
    #[serde(rename = "measured")]
    Measured,
    #[serde(rename = "computed")]
    Computed,
    #[serde(rename = "from a record")]
    Recorded,
    #[serde(rename = "given")]
    Given,
}

impl Known {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Known::Measured => "measured",
            Known::Computed => "computed",
            Known::Recorded => "from a record",
            Known::Given => "given",
        }
    }
}

/// GPUs of one kind.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cards {
    pub(crate) name: String,
    pub(crate) count: usize,
    /// Bytes of each that are free for nq.
    pub(crate) free_bytes: u64,
    pub(crate) memory_known: Known,
    /// 10^9 bytes that each reads in a second; `None` if nobody said.
    pub(crate) read_gb_s: Option<f64>,
    pub(crate) bandwidth_known: Known,
    /// 10^9 bytes of the computer's memory that each reads in a second, known as its bandwidth is.
    pub(crate) copied_gb_s: Option<f64>,
    #[serde(skip)]
    pub(crate) kernels: Kernels,
}

impl Cards {
    /// One of which nothing but the memory will be known.
    pub(crate) fn unnamed() -> Self {
        Cards {
            name: "a card".into(),
            count: 1,
            free_bytes: 0,
            memory_known: Known::Given,
            read_gb_s: None,
            bandwidth_known: Known::Given,
            copied_gb_s: None,
            kernels: cards::kernels(0.0),
        }
    }

    /// What is known of them, for people.
    pub(crate) fn line(&self) -> String {
        let free = human_bytes(self.free_bytes);
        let (memory, bandwidth) = (self.memory_known.word(), self.bandwidth_known.word());
        let read = match self.read_gb_s {
            Some(rate) => format!(", read at {rate:.0} GB/s ({bandwidth})"),
            None => {
                "; its bandwidth is not known, so no speed is computed (--gpu names a card)".into()
            }
        };
        format!(
            "{} x {}: {free} for nq ({memory}){read}",
            self.count, self.name
        )
    }
}

/// The computer itself.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Host {
    pub(crate) free_bytes: u64,
    pub(crate) memory_known: Known,
    /// 10^9 bytes that are read in a second; `None` where that could not be measured.
    pub(crate) read_gb_s: Option<f64>,
    #[serde(skip)]
    pub(crate) cores: Cores,
}

impl Host {
    /// What is known of it, for people.
    pub(crate) fn line(&self) -> String {
        let (free, known) = (human_bytes(self.free_bytes), self.memory_known.word());
        let Cores { threads, isa } = self.cores;
        let read = match self.read_gb_s {
            Some(rate) => {
                format!(", read at {rate:.1} GB/s by {threads} threads (measured, {isa} kernels)")
            }
            None => "; too little is free to measure its bandwidth".into(),
        };
        format!("this computer: {free} for nq ({known}){read}")
    }
}

/// A machine, real or imagined. Without cards the model runs on the CPU.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) cards: Option<Cards>,
    pub(crate) host: Host,
}

impl Machine {
    /// Its name in a sentence.
    pub(crate) fn place(&self) -> String {
        match &self.cards {
            Some(Cards { name, count: 1, .. }) => name.clone(),
            Some(Cards { name, count, .. }) => format!("{count} x {name}"),
            None => "this CPU".into(),
        }
    }
}

/// What a model is to be used for.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Use {
    /// Positions of each conversation.
    pub(crate) context: usize,
    /// Conversations at once.
    pub(crate) clients: usize,
}

/// A kind of file.
pub(crate) struct FileKind {
    /// Flags of `nq quantize` that make it; empty for the model as it is.
    pub(crate) flags: &'static str,
    /// What its codes are called in tables of speed and quality.
    codes: String,
    kinds: Box<dyn Fn(&str) -> WeightKind>,
}

impl FileKind {
    /// The files that nq makes of a model of shape `c`, without those whose groups do not fit its rows.
    ///
    /// # Errors
    /// None for the shape of a model that was opened.
    pub(crate) fn all(c: &ModelConfig) -> anyhow::Result<Vec<Self>> {
        let trellis = |bits| Codes::of_bits(bits, Some(Code::Octagon)).map(Recipe::from);
        let simple = Recipe {
            simple: true,
            ..Bits::B4.into()
        };
        let recipes = [
            ("--trellis --bits 2", "trellis 2", trellis(2.0)?),
            ("--bits 3", "3", Bits::B3.into()),
            ("--trellis --bits 3", "trellis 3", trellis(3.0)?),
            ("--bits 4 --simple", "4 simple", simple),
            ("--trellis", "trellis 4", trellis(4.0)?),
            ("--bits 4", "4", Bits::B4.into()),
            ("--bits 5", "5", Bits::B5.into()),
            ("--bits 6", "6", Bits::B6.into()),
            ("--bits 8", "8", Bits::B8.into()),
        ];
        let mut made = Vec::new();
        for (flags, codes, recipe) in recipes {
            made.push((flags, codes, recipe.schemes(c)?.0));
        }
        let made = made.into_iter().filter(|(.., s)| s.check(c).is_ok());
        let files = made.map(|(flags, codes, schemes)| FileKind {
            flags,
            codes: codes.into(),
            kinds: Box::new(move |name| schemes.kind(name, DType::BF16)),
        });
        let whole = FileKind {
            flags: "",
            codes: "16".into(),
            kinds: Box::new(|_| WeightKind::Dense(DType::BF16)),
        };
        Ok(files.chain([whole]).collect())
    }

    /// The quantized model that is there, as GPUs or CPUs hold it.
    ///
    /// # Errors
    /// A missing or misshapen tensor.
    pub(crate) fn existing(checkpoint: &Checkpoint, on_gpu: bool) -> nq_runtime::Result<Self> {
        let c = checkpoint.config();
        let kinds = weight_kinds(c, checkpoint.store(), on_gpu)?;
        let layer = c.layer(0).linears().last().map(|l| l.name(0));
        let codes = match layer.and_then(|name| kinds.get(&name)) {
            Some(WeightKind::Trellis(scheme)) => format!("trellis {}", scheme.bits()),
            Some(WeightKind::Exl3(scheme)) => format!("exl3 {}", scheme.bits()),
            Some(WeightKind::Affine { scheme, .. }) => scheme.bits.width().to_string(),
            Some(WeightKind::Dense(_)) | None => "16".into(),
        };
        Ok(FileKind {
            flags: "",
            codes,
            kinds: Box::new(move |name| kinds[name]),
        })
    }
}

/// What a model takes beside its text model and the session, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Beside {
    /// Of the tower, the largest image and those that are kept.
    pub(crate) images: u64,
    /// Of the model's own layer that drafts.
    pub(crate) drafts: u64,
    /// Of adapters that are not merged.
    pub(crate) adapters: u64,
    #[serde(skip)]
    pub(crate) drafted_by: DraftedBy,
}

impl Beside {
    fn total(&self) -> u64 {
        self.images + self.drafts + self.adapters
    }

    /// What of it there is, for people.
    pub(crate) fn line(&self) -> Option<String> {
        let parts = [
            (self.images, "images"),
            (self.drafts, "drafts"),
            (self.adapters, "adapters"),
        ];
        let parts = parts.into_iter().filter(|(bytes, _)| *bytes > 0);
        let parts: Vec<String> = parts
            .map(|(bytes, what)| format!("{} for {what}", human_bytes(bytes)))
            .collect();
        (!parts.is_empty()).then(|| format!("beside the text model: {}", parts.join(", ")))
    }
}

/// What a file takes and reaches. Bytes are planned, speeds computed, divergences from records.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct FileRow {
    /// Flags of `nq quantize`; empty for the model as it is.
    pub(crate) file: String,
    /// Type of keys and values: `f16` or `int8`.
    pub(crate) kv: String,
    /// Whether it fits.
    pub(crate) fits: bool,
    /// Why it does not fit, or why nothing can be said.
    pub(crate) why_not: Option<String>,
    /// Bytes of weights, on a CPU as far as they stay in memory.
    pub(crate) weights_bytes: usize,
    /// Bytes of keys, values and states of all clients.
    pub(crate) kv_bytes: usize,
    /// Bytes of activations and tables.
    pub(crate) buffers_bytes: usize,
    /// Bytes needed in all, of the fullest GPU if there are several.
    pub(crate) needed_bytes: u64,
    /// Layers whose experts are on the CPU, where a GPU runs the rest.
    pub(crate) cpu_layers: usize,
    /// Of a mixture whose experts do not all have room on the GPU, how many of each layer have; all are in the
    /// computer's memory. Speed is computed for a text that uses experts again as published ones do.
    pub(crate) gpu_experts: Option<usize>,
    /// Bytes of experts in the computer's memory.
    pub(crate) cpu_bytes: usize,
    /// Bytes of weights that a token reads.
    pub(crate) read_bytes: usize,
    /// Tokens a second of one conversation as it begins.
    pub(crate) tok_s: Option<f64>,
    /// Tokens a second of one conversation whose context is full.
    pub(crate) tok_s_full: Option<f64>,
    /// Tokens a second of all clients together.
    pub(crate) tok_s_all: Option<f64>,
    /// Tokens a second of a prompt of 512 tokens.
    pub(crate) prompt_tok_s: Option<f64>,
    /// The record in benches/records that speeds were computed from.
    pub(crate) speed_record: Option<&'static str>,
    /// Whether that record is of cards with other kernels.
    pub(crate) of_other_kernels: bool,
    /// KL divergence of such a file of the demo model.
    pub(crate) kld: Option<f64>,
    /// The record that it is from.
    pub(crate) kld_record: Option<&'static str>,
}

/// What is asked: a model of shape `config` in some use on a machine.
pub(crate) struct FitQuestion<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) machine: &'a Machine,
    pub(crate) wanted: Use,
    pub(crate) beside: Beside,
}

impl FitQuestion<'_> {
    /// The session of one conversation in `nq chat`, or, for several, of the server.
    fn session(&self, kv: KvType) -> SessionSpec {
        let Use { context, clients } = self.wanted;
        let max_rows = SessionSpec::prompt_rows(self.machine.cards.is_none());
        let one = SessionSpec {
            kv,
            drafts: self.beside.drafted_by,
            ..SessionSpec::of_one(context, max_rows.min(context))
        };
        if clients == 1 {
            return one;
        }
        SessionSpec {
            slots: room::slots(clients, self.config.delta.is_some()),
            pages: Some(clients * context.div_ceil(PAGE)),
            max_rows,
            snapshots: Some(0),
            ..one
        }
    }

    /// Asks whether a server with so many `free` bytes, of which weights take some, gives each of its clients a whole context;
    /// if it does not, says what is there.
    fn serves(
        &self,
        spec: &SessionSpec,
        free: usize,
        planned: impl Fn(&SessionSpec) -> nq_runtime::Result<DeviceMemory>,
    ) -> Result<SessionSpec, String> {
        let weights = planned(spec).map_err(|e| e.to_string())?.weights;
        let free = free.saturating_sub(weights);
        let memory = |spec: &SessionSpec| {
            let planned = planned(spec).ok()?;
            Some(DeviceMemory { free, ..planned })
        };
        let asked = Wanted {
            kv_memory: None,
            state_memory: None,
            ctx: Some(self.wanted.context),
            trained: self.config.longest_context(),
            models: 1,
            parallel: self.wanted.clients,
            beside: self.beside.total(),
        };
        let nothing = |_: &SessionSpec| DeviceMemory::default();
        let served =
            ServedSession::plan(memory, spec, nothing, asked).map_err(|e| e.to_string())?;
        let (pages, all) = (served.spec.page_count() * PAGE, spec.page_count() * PAGE);
        match pages < all {
            true => Err(format!(
                "a server has room for {pages} tokens of all clients together, of {all}"
            )),
            false => Ok(served.spec),
        }
    }

    /// What `file` takes and reaches, with keys and values of type `kv`.
    pub(crate) fn row(&self, file: &FileKind, kv: KvType) -> anyhow::Result<FileRow> {
        let mut row = FileRow {
            file: file.flags.to_owned(),
            kv: kv.to_string(),
            fits: true,
            ..FileRow::default()
        };
        // Whoever made a file that is here knows what it lost; records have files that nq makes.
        let lost = quality(&file.codes).filter(|_| !file.flags.is_empty());
        if let Some((kld, record)) = lost {
            (row.kld, row.kld_record) = (Some(kld), Some(record));
        } else if file.codes == "16" {
            row.kld = Some(0.0);
        }
        match &self.machine.cards {
            Some(cards) => self.on_cards(&mut row, file, kv, cards)?,
            None => self.on_cpu(&mut row, file, kv)?,
        }
        Ok(row)
    }

    fn on_cpu(&self, row: &mut FileRow, file: &FileKind, kv: KvType) -> anyhow::Result<()> {
        let (c, kinds, host) = (self.config, &*file.kinds, &self.machine.host);
        let planner = nq_load::planner(false)?;
        let mut spec = self.session(kv);
        if self.wanted.clients > 1 {
            let free = host.free_bytes as usize;
            match self.serves(&spec, free, |spec| planner(c, kinds, spec)) {
                Ok(served) => spec = served,
                Err(why) => row.refuse(why),
            }
        }
        row.takes(planner(c, kinds, &spec)?);
        let peak = plan::peak(c, kinds, WeightSource::Mapped, &spec);
        row.needed_bytes = plan::BASE + peak + self.beside.total();
        row.read_bytes = plan::bytes_per_token(c, kinds);
        if row.needed_bytes > host.free_bytes {
            row.refuse("more memory than is free".into());
        }
        let Some(bandwidth) = host.read_gb_s.map(|b| 1e9 * b) else {
            return Ok(());
        };
        let weights = row.read_bytes;
        row.reaches(self, |kv| {
            speed::on_cpu(c, &file.codes, host.cores, (weights + kv) as f64, bandwidth)
        });
        row.prompt_tok_s = speed::prompt_on_cpu(c, &file.codes, host.cores).map(|s| s.tok_s);
        Ok(())
    }

    fn on_cards(
        &self,
        row: &mut FileRow,
        file: &FileKind,
        kv: KvType,
        cards: &Cards,
    ) -> anyhow::Result<()> {
        let (c, kinds, clients) = (self.config, &*file.kinds, self.wanted.clients);
        let planner = nq_load::planner(true)?;
        let free = cards.free_bytes.saturating_sub(self.beside.total());
        let free = vec![free as usize; cards.count];
        let mut spec = self.session(kv);
        let whole = match planner(c, kinds, &spec) {
            Ok(whole) => whole,
            Err(why) => {
                row.refuse(why.to_string());
                return Ok(());
            }
        };
        // A server divides what the weights leave free.
        if let (2.., [one]) = (clients, &free[..]) {
            match self.serves(&spec, *one, |spec| planner(c, kinds, spec)) {
                Ok(served) => spec = served,
                Err(why) if c.experts.is_none() => row.refuse(why),
                Err(_) => {} // some experts may go to the CPU
            }
        }
        let host = self.machine.host.free_bytes as usize;
        let placed = match gpu::place(c, kinds, &spec, &free, host) {
            Ok(placed) => placed,
            Err(why) => {
                row.takes(whole);
                row.refuse(match why {
                    Error::DeviceMemory { .. } => "more memory than the card has free".into(),
                    other => other.to_string(),
                });
                return Ok(());
            }
        };
        row.takes(placed.memory);
        row.needed_bytes += self.beside.total();
        (row.cpu_layers, row.cpu_bytes) = (placed.on_host, placed.host_bytes);
        row.gpu_experts = placed.rooms;
        row.read_bytes = placed.read + placed.host_read;
        if placed.host_bytes as u64 > self.machine.host.free_bytes {
            row.refuse("its experts take more than the computer's free memory".into());
        }
        row.reaches(self, |kv| self.decode_on(&file.codes, cards, &placed, kv));
        if placed.on_host == 0 && placed.rooms.is_none() {
            row.prompt_tok_s = speed::prompt_on_gpu(c, &file.codes, cards.kernels).map(|s| s.tok_s);
            let more = speed::together(c, clients).filter(|_| clients > 1);
            row.tok_s_all = more.zip(row.tok_s).map(|(more, one)| more.tok_s * one);
        }
        Ok(())
    }

    /// Decode on GPUs, with experts on the CPU if some are there: a token passes all of them, one after the other. Of experts
    /// that have no rooms, a GPU waits for those that a text needs.
    fn decode_on(
        &self,
        codes: &str,
        cards: &Cards,
        placed: &Placed,
        kv: usize,
    ) -> Option<Computed> {
        let bandwidth = 1e9 * cards.read_gb_s?;
        let on_gpu = |bytes: usize| {
            let (c, kernels) = (self.config, cards.kernels);
            speed::on_gpu(c, codes, kernels, (bytes + kv) as f64, bandwidth)
        };
        if let (Some(rooms), Some(experts)) = (placed.rooms, self.config.experts) {
            let missing = 1.0 - speed::found(rooms as f64 / experts.count as f64);
            let waiting = missing * placed.host_read as f64 / (1e9 * cards.copied_gb_s?);
            let there = on_gpu(placed.read + placed.host_read)?;
            return Some(Computed {
                tok_s: 1.0 / (1.0 / there.tok_s + waiting),
                record: speed::FOUND,
                ..there
            });
        }
        let there = on_gpu(placed.read)?;
        if placed.on_host == 0 {
            return Some(there);
        }
        let reading = placed.host_read as f64 / (1e9 * self.machine.host.read_gb_s?);
        let least = HOST_LAYER * placed.on_host as f64;
        Some(Computed {
            tok_s: 1.0 / (1.0 / there.tok_s + reading.hypot(least)),
            record: "2026-11-23-gpu-mixture.csv",
            ..there
        })
    }
}

impl FileRow {
    /// Its row in the table for people, with the speed of all clients if there are `several`.
    pub(crate) fn line(&self, several: bool) -> String {
        let figure = |value: Option<f64>| match value.filter(|_| self.fits) {
            Some(v) if v < 10.0 => format!("{v:.1}"),
            Some(v) => format!("{v:.0}"),
            None => "–".to_owned(),
        };
        let fits = match (self.fits, self.gpu_experts, self.cpu_layers) {
            (true, Some(n), _) => format!("with {n} experts of each layer on the GPU"),
            (true, None, 0) => "yes".to_owned(),
            (true, None, n) => format!("with experts of {n} layers on the CPU"),
            (false, ..) => self.why_not.clone().unwrap_or_default(),
        };
        let file = match &*self.file {
            "" => "as it is",
            flags => flags,
        };
        let mut cells = vec![
            file.to_owned(),
            self.kv.clone(),
            human_bytes(self.needed_bytes),
            fits,
        ];
        cells.extend([self.tok_s, self.tok_s_full].map(figure));
        cells.extend(several.then(|| figure(self.tok_s_all)));
        cells.push(figure(self.prompt_tok_s));
        cells.push(self.kld.map_or("–".into(), |v| format!("{v:.4}")));
        format!("| {} |", cells.join(" | "))
    }

    fn refuse(&mut self, why: String) {
        self.fits = false;
        self.why_not.get_or_insert(why);
    }

    fn takes(&mut self, memory: DeviceMemory) {
        self.weights_bytes = memory.weights;
        self.kv_bytes = memory.kv;
        self.buffers_bytes = memory.scratch;
        self.needed_bytes = memory.total() as u64;
    }

    /// Speed, by bytes of keys and values that a token reads: of none, and of a conversation's whole context.
    fn reaches(&mut self, asked: &FitQuestion<'_>, decode: impl Fn(usize) -> Option<Computed>) {
        let first = decode(0);
        self.tok_s = first.map(|s| s.tok_s);
        self.tok_s_full = decode(self.kv_bytes / asked.wanted.clients).map(|s| s.tok_s);
        self.speed_record = first.map(|s| s.record);
        self.of_other_kernels = first.is_some_and(|s| s.of_other_kernels);
    }
}

/// KL divergence of files of the demo model with these codes, and its record.
fn quality(codes: &str) -> Option<(f64, &'static str)> {
    speed::lines(include_str!("fit/quality.csv")).find_map(|row| match row[..] {
        [of_codes, kld, record] if of_codes == codes => Some((kld.parse().ok()?, record)),
        _ => None,
    })
}

/// The best of the rows that fit, among those whose loss a record has, if one has. Of those that are fast enough to
/// read along: the fastest whose divergence nobody notices. If none is fast enough: the fastest of fair divergence.
/// Where none has so little, the one of the least.
pub(crate) fn best(rows: &[FileRow]) -> Option<&FileRow> {
    // Keys and values in 8 bits cost quality too: only where others do not fit.
    let first = |r: &&FileRow| {
        let wider = |o: &FileRow| o.fits && o.file == r.file && o.kv == KvType::F16.to_string();
        r.fits && (r.kv == KvType::F16.to_string() || !rows.iter().any(wider))
    };
    let mut among: Vec<&FileRow> = rows.iter().filter(first).collect();
    // Unless there are none such, those that `keep` does.
    let mut prefer = |keep: &dyn Fn(&FileRow) -> bool| -> bool {
        let some = among.iter().any(|r| keep(r));
        among.retain(|r| !some || keep(r));
        some
    };
    prefer(&|r| r.kld.is_some());
    let most = match prefer(&|r| r.tok_s_full.is_none_or(|s| s >= ENOUGH)) {
        true => UNNOTICED,
        false => FAIR,
    };
    let loss = |r: &FileRow| r.kld.unwrap_or(f64::MAX);
    let good = prefer(&|r| loss(r) <= most);
    // Of equal ones the first.
    let speed = |r: &FileRow| r.tok_s_full.unwrap_or(0.0);
    let by = |a: &&&FileRow, b: &&&FileRow| match good || a.kld.is_none() {
        true => speed(b).total_cmp(&speed(a)),
        false => loss(a).total_cmp(&loss(b)),
    };
    among.iter().min_by(by).copied()
}

#[cfg(test)]
mod tests;
