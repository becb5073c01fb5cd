//! The models that are served, each of which can be loaded repeatedly, and the memory reserved for
//! their sequences.

use super::ServeArgs;
use crate::adapters::check_device;
use crate::at_load::{self, at_load, sight};
use crate::draft::{self, DraftFrom, DraftWeights};
use crate::flags::{AdapterArg, Global};
use crate::heat;
use crate::library::Error;
use crate::model;
use crate::sight::SightBytes;
use crate::system::available_memory;
use crate::terminal::{Terminal, human_bytes};
use anyhow::{Context, bail};
use nq_answers::{Sight, SightOptions};
use nq_cpu::adapter_bytes;
use nq_formats::adapter::{Adapter, Lora};
use nq_formats::hash::sha256_hex;
use nq_formats::{Checkpoint, Progress, Task};
use nq_kernels::pages::PAGE;
use nq_load::Drafts;
use nq_load::device::Device;
use nq_quantize::schemes::Schemes;
use nq_runtime::{
    ChatTemplate, DeviceChoice, DeviceMemory, Engine, KvType, LoadOptions, SessionSpec,
};
use nq_serve::about::{self, About, AboutTower};
use nq_serve::room::{self, RoomError, ServedSession, Wanted};
use nq_serve::{EngineOptions, LoadError, ModelSource, OpenDrafts, PageStore, ServedModel};
use std::sync::Arc;
use std::time::Duration;

/// Settings for loading all models.
#[derive(Clone)]
pub(super) struct LoadingSettings {
    load: LoadOptions,
    bits: Option<u32>,
    engine: EngineOptions,
    ctx: Option<usize>,
    kv: KvType,
    kv_memory: Option<u64>,
    state_memory: Option<u64>,
    sight: SightOptions,
    /// Number of models that share the memory for keys and values.
    models: u64,
    /// True if models may be loaded beside one another.
    several: bool,
    /// Keys and values on disk, which survive the server.
    pages: Option<Arc<PageStore>>,
    /// The drafter of models whose drafter has no weights.
    draft: Option<DraftFrom>,
}

impl LoadingSettings {
    pub(super) fn new(
        args: &ServeArgs,
        global: &Global,
        models: usize,
        terminal: &Arc<Terminal>,
    ) -> anyhow::Result<Self> {
        let load = global.load_options();
        let on_gpu = Device::choose(load.device)? != Device::Cpu;
        let pages = match &args.cache_dir {
            None => None,
            Some(folder) => {
                let progress = Arc::clone(terminal) as Arc<dyn Progress>;
                let opened = PageStore::open(folder, args.cache_size, progress);
                Some(opened.with_context(|| format!("--cache-dir {}", folder.display()))?)
            }
        };
        Ok(LoadingSettings {
            load,
            bits: args.bits,
            engine: EngineOptions {
                parallel: args.parallel.into(),
                queue: args.queue.into(),
                max_pause: args.max_pause.map(|ms| Duration::from_millis(ms.into())),
                prefix_cache: !args.no_prefix_cache,
                ..EngineOptions::of_device(on_gpu)
            },
            ctx: args.ctx,
            sight: SightOptions {
                tokens: args.image_tokens,
                ..SightOptions::default()
            },
            kv: args.kv,
            kv_memory: args.kv_memory,
            state_memory: args.state_memory,
            models: models.max(1) as u64,
            several: models > 1 || args.models_dir.is_some(),
            pages,
            draft: args.draft.clone().filter(|d| !d.has_weights()),
        })
    }
}

/// A model on disk, or built in.
pub(super) struct Loadable {
    name: String,
    checkpoint: Arc<Checkpoint>,
    /// Schemes for quantizing it at load.
    schemes: Option<Schemes>,
    /// The drafter that was asked for.
    asked: Option<DraftFrom>,
    /// The weights of its drafter.
    draft: Option<DraftWeights>,
    adapters: Vec<AdapterArg>,
    settings: LoadingSettings,
    terminal: Arc<Terminal>,
}

/// A running model and the memory reserved for it.
pub(super) struct Loaded {
    pub(super) model: ServedModel,
    pub(super) device: String,
    pub(super) spec: SessionSpec,
    pub(super) kv_bytes: u64,
    /// Tokens of a prefix of all requests from which on it is read once for all of them.
    pub(super) read_once_from: Option<usize>,
}

impl Loadable {
    /// Finds a model and reads its files' headers, without loading it.
    pub(super) fn new(
        name: Option<&str>,
        model: model::FoundModel,
        settings: &LoadingSettings,
        terminal: &Arc<Terminal>,
    ) -> anyhow::Result<Self> {
        let (checkpoint, schemes) = at_load(model.checkpoint, settings.bits, &**terminal)?;
        model::note_growth(&checkpoint, &**terminal);
        let trained = checkpoint.config().longest_context();
        if let Some(n) = settings.ctx.filter(|n| !(2..=trained).contains(n)) {
            bail!("--ctx: expected 2 to {trained}, the model's longest, found {n}");
        }
        let mut settings = settings.clone();
        let drafts = settings.draft.as_ref().map(|_| "drafts");
        let beside = drafts.or(settings.several.then_some("several models in one server"));
        settings.load.device =
            Device::for_model(settings.load.device, &checkpoint, beside, &**terminal);
        let draft = match &settings.draft {
            Some(_) => None,
            None => draft::by_default(&checkpoint, &settings.load)?,
        };
        Ok(Loadable {
            name: name.map_or(model.name, str::to_owned),
            checkpoint: Arc::new(checkpoint),
            schemes,
            asked: settings.draft.clone(),
            draft,
            adapters: Vec::new(),
            settings,
            terminal: Arc::clone(terminal),
        })
    }

    /// With the drafter that was asked for, if it has weights.
    pub(super) fn with_draft(mut self, draft: Option<DraftWeights>) -> Self {
        if let Some(draft) = draft {
            self.runs_beside("drafts");
            self.asked = Some(draft.named());
            self.draft = Some(draft);
        }
        self
    }

    /// Leaves an adapter that `auto` took, if kernels there do not run what goes beside the model.
    fn runs_beside(&mut self, beside: &str) {
        let device = &mut self.settings.load.device;
        if let DeviceChoice::WgpuOrCpu(_) = device {
            let (auto, progress) = (DeviceChoice::Auto, &*self.terminal);
            *device = Device::for_model(auto, &self.checkpoint, Some(beside), progress);
        }
    }

    /// With adapters beside its weights.
    ///
    /// # Errors
    /// An adapter of another model, or one that can only be merged; several GPUs.
    pub(super) fn with_adapters(mut self, adapters: &[AdapterArg]) -> anyhow::Result<Self> {
        if !adapters.is_empty() {
            self.runs_beside("adapters beside a model");
            check_device(&self.settings.load)?;
        }
        self.adapters = adapters.to_vec();
        self.loras().map(|_| self)
    }

    /// Reads its adapters.
    fn loras(&self) -> anyhow::Result<Vec<Lora>> {
        let read = |arg: &AdapterArg| {
            let adapter = Adapter::open(&arg.path, arg.weight)?;
            Ok(adapter.lora(self.checkpoint.config())?)
        };
        self.adapters.iter().map(read).collect()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn task(&self) -> Task {
        self.checkpoint.task().clone()
    }

    /// Loads it and reports the memory reserved; `first`: no other model is loaded that could make room.
    ///
    /// # Errors
    /// [`RoomError::Short`] if it does not fit the memory, nor would if weights for which there is no room lie in a file.
    pub(super) fn load(&self, first: bool) -> anyhow::Result<Loaded> {
        let mut options = self.settings.load;
        let (checkpoint, schemes) = (&self.checkpoint, self.schemes.as_ref());
        let loras = self.loras()?;
        let (config, store) = (checkpoint.config(), checkpoint.store());
        let loaded = nq_load::load_on_adapter(config, store, &options, &*self.terminal)?;
        if let (DeviceChoice::WgpuOrCpu(_), None) = (options.device, &loaded) {
            options.device = DeviceChoice::Cpu;
        }
        let mut beside = 0;
        if Device::choose(options.device)? == Device::Cpu {
            let least = self.spec(PAGE, 1);
            let running = at_load::memory(checkpoint, schemes, &least)?;
            let draft = self.draft.as_ref();
            let draft = draft.map(|d| d.memory(checkpoint.config(), &least));
            let draft = draft.transpose()?.map_or(0, |(_, bytes)| bytes);
            let adapters = adapter_bytes(checkpoint.config(), &loras, least.max_rows)?;
            let images = SightBytes::plan(checkpoint, &options, &self.settings.sight)?;
            beside = images.as_ref().map_or(0, SightBytes::total);
            let in_file = if first { running.layers } else { 0 };
            let needed = running.peak - in_file + draft + adapters as u64 + beside;
            let free = available_memory().unwrap_or(u64::MAX);
            if needed > free {
                let drafts = "for drafts (--draft none)";
                let images = "for images (a smaller --image-tokens helps)";
                let parts = [(draft, drafts), (beside, images)].into_iter();
                let parts = parts.filter(|(bytes, _)| *bytes > 0);
                let parts: Vec<String> = parts
                    .map(|(bytes, what)| format!("{} of which are {what}, ", human_bytes(bytes)))
                    .collect();
                let help = (!parts.is_empty()).then(|| {
                    format!(
                        "this needs {} of memory, {}and {} are free",
                        human_bytes(needed),
                        parts.concat(),
                        human_bytes(free)
                    )
                });
                return Err(RoomError::Short { needed, free, help }.into());
            }
        }
        options.session = Some(self.least_session());
        options.session_grows = true;
        let mut engine = match loaded {
            Some(engine) => engine,
            None => nq_load::load(config, store, &options, &*self.terminal)?,
        };
        if !loras.is_empty() {
            engine = engine.with_adapters(&loras, &[])?;
        }
        drop(loras);
        heat::keep(&self.checkpoint, engine.as_ref(), &*self.terminal)?;
        let device = engine.description().device.clone();
        let drafts = self.drafts(engine.as_ref())?;
        // Before the session takes its share of what is free.
        let sight = sight(&self.checkpoint, &self.settings.load, self.settings.sight);
        sight.as_ref().map(Sight::load).transpose()?;
        let ServedSession {
            spec,
            bytes: kv_bytes,
        } = self.session(engine.as_ref(), drafts.as_ref(), beside)?;
        let parallel = self.settings.engine.parallel;
        let read_once_from = engine.read_once_from(&spec, parallel);
        let mut options = self.settings.engine.clone();
        let asked = self.asked.is_some();
        options.adapters = self
            .adapters
            .iter()
            .map(identity)
            .collect::<Result<_, _>>()?;
        options.drafts = drafts.map(|drafts| {
            let progress = Arc::clone(&self.terminal) as Arc<dyn Progress>;
            OpenDrafts::new(move |session| drafts.speculation(session, asked), progress)
        });
        if let Some(pages) = &self.settings.pages {
            options.disk = Some(pages.of_model(&self.identity(engine.as_ref())?));
        }
        let mut model = ServedModel::new(&self.name, checkpoint, engine, spec, options)?;
        model.quantized_at_load(self.bits_at_load());
        if let (Some(sight), Some(tower)) = (sight, self.tower()) {
            model.set_sight(sight, tower);
        }
        let pages = spec.page_count();
        let sharing = match (self.settings.engine.prefix_cache, read_once_from) {
            (false, _) => "; nothing is kept for prompts to come".to_owned(),
            (true, None) => ", shared where prompts begin alike".to_owned(),
            (true, Some(tokens)) => format!(
                ", shared where prompts begin alike; a beginning of {tokens} tokens or more that all \
                 {parallel} requests share is read once per step"
            ),
        };
        let states = match checkpoint.config().delta {
            None => String::new(),
            Some(_) => format!(
                ", with the states of {} sequences and room for {} more at earlier lengths",
                spec.slots,
                spec.snapshot_count()
            ),
        };
        self.terminal.note(&format!(
            "{} on {device}: {parallel} requests at once, contexts of {} tokens, {} tokens of keys \
             and values{states}, in {}{sharing}",
            self.name,
            spec.ctx,
            pages * PAGE,
            human_bytes(kv_bytes),
        ));
        Ok(Loaded {
            model,
            device,
            spec,
            kv_bytes,
            read_once_from,
        })
    }

    /// Its drafter, loaded.
    fn drafts(&self, engine: &dyn Engine) -> anyhow::Result<Option<Drafts>> {
        // As the session that serves will, it has room for states to return to, unless there is to be none.
        let spec = SessionSpec {
            snapshots: Some(usize::from(self.settings.state_memory != Some(0))),
            ..self.spec(PAGE, 1)
        };
        let session = engine.session(spec)?;
        let load = |draft: &DraftWeights| {
            draft.load(&self.settings.load, &self.checkpoint, &*self.terminal)
        };
        let loaded = self.draft.as_ref().map(load).transpose();
        let loaded = loaded.map_err(Error::untyped)?;
        let device = &engine.description().device;
        draft::drafts(
            self.asked.as_ref(),
            session.as_ref(),
            device,
            &*self.terminal,
            loaded,
        )
        .map_err(Error::untyped)
    }

    /// All that keys and values depend on, beside the tokens: the program, how it computes, and the weights.
    fn identity(&self, engine: &dyn Engine) -> anyhow::Result<Vec<u8>> {
        let how = engine.description();
        let mut text = format!(
            "{} {PAGE} {} {} {} {} {:?} {:?}\n",
            env!("CARGO_PKG_VERSION"),
            self.settings.kv,
            how.device,
            how.kernels,
            how.activations,
            self.schemes,
            self.checkpoint.config(),
        );
        text += &about::identity(&self.checkpoint)?;
        Ok(text.into_bytes())
    }

    /// The bits that it is quantized to at load, if it is.
    fn bits_at_load(&self) -> Option<u32> {
        self.schemes.as_ref().and(self.settings.bits)
    }

    /// The tower that it sees with.
    fn tower(&self) -> Option<AboutTower> {
        AboutTower::of(&self.checkpoint, self.settings.sight.tokens)
    }

    /// The size of a session without snapshots.
    fn spec(&self, ctx: usize, pages: usize) -> SessionSpec {
        let on_gpu = !matches!(Device::choose(self.settings.load.device), Ok(Device::Cpu));
        let recurrent = self.checkpoint.config().delta.is_some();
        SessionSpec {
            slots: room::slots(self.settings.engine.parallel, recurrent),
            ctx,
            pages: Some(pages),
            kv: self.settings.kv,
            max_rows: SessionSpec::prompt_rows(!on_gpu),
            snapshots: Some(0),
            drafts: draft::drafted_by(self.asked.as_ref(), self.draft.as_ref()),
        }
    }

    /// The smallest session in which it serves: with room for one sequence as long as is asked for.
    fn least_session(&self) -> SessionSpec {
        let pages = self.settings.ctx.unwrap_or(PAGE).div_ceil(PAGE);
        let trained = self.checkpoint.config().longest_context();
        SessionSpec {
            ctx: self.settings.ctx.unwrap_or(trained),
            // A tenth of what is free for pages stays free.
            ..self.spec(PAGE, pages + pages.div_ceil(8))
        }
    }

    /// The session in which it serves, `beside` as many bytes of memory for images.
    fn session(
        &self,
        engine: &dyn Engine,
        drafts: Option<&Drafts>,
        beside: u64,
    ) -> Result<ServedSession, RoomError> {
        let (settings, config) = (&self.settings, self.checkpoint.config());
        let of_drafts = |spec: &SessionSpec| {
            drafts.map_or_else(DeviceMemory::default, |d| d.device_memory(spec))
        };
        if config.delta.is_none() && settings.state_memory.is_some() {
            let name = &self.name;
            (self.terminal).note(&format!("--state-memory: {name} has no recurrences"));
        }
        let wanted = Wanted {
            kv_memory: settings.kv_memory,
            state_memory: settings.state_memory,
            ctx: settings.ctx,
            trained: config.longest_context(),
            beside,
            models: settings.models,
            parallel: settings.engine.parallel,
        };
        let memory = |spec: &SessionSpec| engine.device_memory(spec);
        ServedSession::plan(memory, &self.spec(PAGE, 1), of_drafts, wanted)
    }
}

/// A number that stands for an adapter's contents and what multiplies them.
fn identity(adapter: &AdapterArg) -> nq_formats::Result<u64> {
    let contents = Adapter::sha256(&adapter.path)?;
    let digest = sha256_hex(format!("{contents} {}", adapter.weight).as_bytes());
    let digits = digest.bytes().take(16);
    let digit = |d: u8| u64::from(char::from(d).to_digit(16).unwrap_or(0));
    Ok(digits.fold(0, |all, d| all << 4 | digit(d)))
}

impl ModelSource for Loadable {
    fn load(&self) -> Result<ServedModel, LoadError> {
        let loaded = Loadable::load(self, false);
        loaded.map(|l| l.model).map_err(|e| {
            self.terminal
                .note(&format!("{} is not loaded: {e:#}", self.name));
            short_of(&e).unwrap_or(LoadError::Failed)
        })
    }

    fn about(&self) -> Option<About> {
        let template = ChatTemplate::find(self.checkpoint.files());
        // What is wrong with a template is told when the model is loaded.
        let template = template.ok().flatten();
        let trained = self.checkpoint.config().longest_context();
        let context = self.settings.ctx.unwrap_or(trained);
        Some(About {
            bits_at_load: self.bits_at_load(),
            tower: self.tower(),
            ..About::of(&self.checkpoint, &self.name, template.as_ref(), context)
        })
    }
}

/// The figures of a memory error; `None` for other errors.
fn short_of(e: &anyhow::Error) -> Option<LoadError> {
    let (needed, free) = match (e.downcast_ref(), e.downcast_ref()) {
        (Some(RoomError::Short { needed, free, .. }), _) => (*needed, *free),
        (
            _,
            Some(nq_runtime::Error::Memory {
                needed, available, ..
            }),
        ) => (*needed, *available),
        (_, Some(nq_runtime::Error::DeviceMemory { needed, free, .. })) => (*needed, *free),
        _ => return None,
    };
    Some(LoadError::Memory { needed, free })
}
