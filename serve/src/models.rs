//! The models of a server by name: loaded on first use, and unloaded for one another if memory
//! is short.

use crate::about::About;
use crate::error::ApiError;
use crate::metrics;
use crate::model::ServedModel;
use nq_formats::human_bytes;
use nq_runtime::AppliedAdapter;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A model that can be loaded repeatedly.
pub trait ModelSource: Send + Sync {
    /// Loads the model if memory allows; details of errors are reported to the server's operator.
    ///
    /// # Errors
    /// [`LoadError`].
    fn load(&self) -> Result<ServedModel, LoadError>;

    /// What is known of it before it is loaded.
    fn about(&self) -> Option<About> {
        None
    }
}

/// Why a model was not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// It does not fit.
    #[error("it needs {needed} bytes of memory, and {free} are free")]
    Memory {
        /// Bytes that it takes, including keys and values of one context.
        needed: u64,
        /// Bytes available.
        free: u64,
    },
    /// Any other reason.
    #[error("it cannot be loaded")]
    Failed,
}

/// Models by name; the first serves requests that name none.
#[derive(Default)]
pub struct Models {
    entries: Vec<ModelEntry>,
    /// Other names of models, and their indices.
    aliases: Vec<(String, usize)>,
    adapters: Vec<NamedAdapter>,
    states: Mutex<States>,
    /// Held while loading: one model at a time, so that the next sees how much memory is left.
    loading: tokio::sync::Mutex<()>,
}

/// An adapter by whose name clients ask for the model that has it.
struct NamedAdapter {
    name: String,
    /// The index of its model.
    model: usize,
    /// Its place among that model's adapters.
    place: usize,
}

struct ModelEntry {
    name: String,
    created: u64,
    source: Option<Box<dyn ModelSource>>,
    about: Option<About>,
    /// True: once loaded, it stays.
    pinned: bool,
}

impl ModelEntry {
    /// True if it may be unloaded, because it can be loaded again.
    fn can_go(&self) -> bool {
        self.source.is_some() && !self.pinned
    }
}

#[derive(Default)]
struct States {
    /// For each entry, the model while it is loaded, and the number of its last request.
    loaded: Vec<(Option<Arc<ServedModel>>, u64)>,
    /// When each was last seen in use.
    used: Vec<Instant>,
    /// How often each was loaded.
    loads: Vec<u64>,
    clock: u64,
    closed: bool,
}

/// A model's entry in a list.
pub struct Listed<'a> {
    /// Its name for clients.
    pub name: &'a str,
    /// Other names for it.
    pub aliases: Vec<&'a str>,
    /// Names of its adapters.
    pub adapters: Vec<&'a str>,
    /// When the server first knew it, in seconds since 1970.
    pub created: u64,
    /// What is known of it, loaded or not.
    pub about: Option<&'a About>,
    /// True: once loaded, it stays.
    pub pinned: bool,
    /// How often it was loaded.
    pub loads: u64,
    /// How long nobody has used it.
    pub idle: Duration,
    /// The model, while it is loaded.
    pub model: Option<&'a ServedModel>,
}

/// Models that are loaded and never unloaded.
impl From<Vec<Arc<ServedModel>>> for Models {
    fn from(models: Vec<Arc<ServedModel>>) -> Self {
        let mut all = Models::default();
        for model in models {
            all.push(model.name().to_owned(), None, Some(model));
        }
        all
    }
}

impl Models {
    /// Adds a model that is loaded on request.
    pub fn add(&mut self, name: impl Into<String>, source: Box<dyn ModelSource>) {
        self.push(name.into(), Some(source), None);
    }

    /// Adds a model that `source` has loaded.
    pub fn add_loaded(&mut self, source: Box<dyn ModelSource>, model: ServedModel) {
        let name = model.name().to_owned();
        self.push(name, Some(source), Some(Arc::new(model)));
    }

    fn push(
        &mut self,
        name: String,
        source: Option<Box<dyn ModelSource>>,
        model: Option<Arc<ServedModel>>,
    ) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let loaded = model.as_ref().map(|m| m.about().clone());
        self.entries.push(ModelEntry {
            name,
            created: since.map_or(0, |d| d.as_secs()),
            about: loaded.or_else(|| source.as_ref()?.about()),
            source,
            pinned: false,
        });
        let mut states = self.states();
        states.loads.push(model.is_some().into());
        states.loaded.push((model, 0));
        states.used.push(Instant::now());
    }

    /// Gives a model, or an adapter of one, another name.
    ///
    /// # Errors
    /// A name that is taken, or no such model.
    pub fn alias(&mut self, alias: &str, name: &str) -> Result<(), ApiError> {
        let (at, adapter) = self.named(Some(name))?;
        if let Some(place) = adapter.map(|a| a.place) {
            return self.adapter(alias, name, place);
        }
        if self.find(Some(alias)).is_ok() {
            return Err(ApiError::invalid(format!(
                "{alias} is the name of two models"
            )));
        }
        self.aliases.push((alias.to_owned(), at));
        Ok(())
    }

    /// Lets clients ask by `adapter` for the model `name` with the adapter at this place of its engine's.
    ///
    /// # Errors
    /// A name that is taken, or no such model.
    pub fn adapter(&mut self, adapter: &str, name: &str, place: usize) -> Result<(), ApiError> {
        let model = self.find(Some(name))?;
        if self.find(Some(adapter)).is_ok() {
            return Err(ApiError::invalid(format!(
                "{adapter} is the name of two models"
            )));
        }
        self.adapters.push(NamedAdapter {
            name: adapter.to_owned(),
            model,
            place,
        });
        Ok(())
    }

    /// Once it is loaded, a model stays so.
    ///
    /// # Errors
    /// No such model.
    pub fn pin(&mut self, name: &str) -> Result<(), ApiError> {
        let at = self.find(Some(name))?;
        self.entries[at].pinned = true;
        Ok(())
    }

    fn states(&self) -> MutexGuard<'_, States> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps `f` over all models in order. None is loaded or unloaded meanwhile.
    pub fn each<T>(&self, f: impl Fn(Listed<'_>) -> T) -> Vec<T> {
        let states = self.states();
        let listed = |(at, entry): (usize, &'_ ModelEntry)| {
            let model = states.loaded[at].0.as_ref();
            let in_use = model.is_some_and(ServedModel::is_in_use);
            let aliases = self.aliases.iter().filter(|a| a.1 == at);
            let adapters = self.adapters.iter().filter(|a| a.model == at);
            f(Listed {
                name: &entry.name,
                aliases: aliases.map(|a| a.0.as_str()).collect(),
                adapters: adapters.map(|a| a.name.as_str()).collect(),
                created: entry.created,
                about: model.map(|m| m.about()).or(entry.about.as_ref()),
                pinned: entry.pinned,
                loads: states.loads[at],
                idle: match in_use {
                    true => Duration::ZERO,
                    false => states.used[at].elapsed(),
                },
                model: model.map(Arc::as_ref),
            })
        };
        self.entries.iter().enumerate().map(listed).collect()
    }

    /// The index of the model that a request names; the first if it names none.
    ///
    /// # Errors
    /// If no model has that name.
    pub fn find(&self, name: Option<&str>) -> Result<usize, ApiError> {
        self.named(name).map(|named| named.0)
    }

    /// The index of the model that a request names, and the adapter if that is what it names.
    fn named(&self, name: Option<&str>) -> Result<(usize, Option<&NamedAdapter>), ApiError> {
        let found = match name {
            None => (!self.entries.is_empty()).then_some((0, None)),
            Some(name) => {
                let named = |name: &str| {
                    let adapter = self.adapters.iter().find(|a| a.name == name);
                    let alias = self.aliases.iter().find(|a| a.0 == name);
                    let own = self.entries.iter().position(|e| e.name == name);
                    let model = own.or(alias.map(|a| a.1)).map(|at| (at, None));
                    model.or(adapter.map(|a| (a.model, Some(a))))
                };
                // Clients of Ollama name a version too.
                named(name).or_else(|| named(name.strip_suffix(":latest")?))
            }
        };
        found.ok_or_else(|| {
            let own = self.entries.iter().map(|e| e.name.as_str());
            let adapters = self.adapters.iter().map(|a| a.name.as_str());
            let names: Vec<&str> = own.chain(adapters).collect();
            ApiError {
                param: Some("model".into()),
                ..ApiError::not_found(
                    format!(
                        "there is no model {:?}: {} is served",
                        name.unwrap_or_default(),
                        names.join(", ")
                    ),
                    "model_not_found",
                )
            }
        })
    }

    /// Returns a model for use: it stays loaded as long as the result exists.
    ///
    /// # Errors
    /// If no model has that name, or if it cannot be loaded.
    pub async fn get(self: &Arc<Self>, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let (at, adapter) = self.named(name)?;
        let model = self.loaded(at).await?;
        Ok(match adapter {
            None => model,
            Some(NamedAdapter { name, place, .. }) => {
                let applied = AppliedAdapter {
                    adapter: *place,
                    scale: 1.0,
                };
                Arc::new(model.with(name.clone(), vec![applied]))
            }
        })
    }

    async fn loaded(self: &Arc<Self>, at: usize) -> Result<Arc<ServedModel>, ApiError> {
        if let Some(model) = self.take(at)? {
            return Ok(model);
        }
        let models = Arc::clone(self);
        // Loading continues even if the requester is gone.
        let loaded = tokio::spawn(async move {
            let all = Arc::clone(&models);
            let _alone = all.loading.lock().await;
            tokio::task::spawn_blocking(move || models.load(at)).await
        });
        match loaded.await {
            Ok(Ok(loaded)) => loaded,
            _ => Err(ApiError::internal("the model could not be loaded: a panic")),
        }
    }

    /// Returns the model, if it is loaded, and marks it as just used.
    fn take(&self, at: usize) -> Result<Option<Arc<ServedModel>>, ApiError> {
        let mut states = self.states();
        if states.closed {
            return Err(crate::engine::Refused::Closing.into());
        }
        states.clock += 1;
        let clock = states.clock;
        states.used[at] = Instant::now();
        let (model, used) = &mut states.loaded[at];
        *used = clock;
        Ok(model.clone())
    }

    fn load(&self, at: usize) -> Result<Arc<ServedModel>, ApiError> {
        loop {
            // Another request may have loaded the same model meanwhile.
            if let Some(model) = self.take(at)? {
                return Ok(model);
            }
            let entry = &self.entries[at];
            let loaded = match &entry.source {
                Some(source) => source.load(),
                None => Err(LoadError::Failed),
            };
            match loaded {
                Ok(model) => {
                    let model = Arc::new(model);
                    let mut states = self.states();
                    if !states.closed {
                        // Loading may have taken longer than a model may be idle.
                        states.used[at] = Instant::now();
                        states.loads[at] += 1;
                        states.loaded[at].0 = Some(Arc::clone(&model));
                    }
                    return Ok(model);
                }
                Err(LoadError::Memory { needed, free }) => {
                    if !self.unload_idle() {
                        return Err(self.no_room(&entry.name, needed, free));
                    }
                }
                Err(LoadError::Failed) => {
                    let what = format!(
                        "{} could not be loaded: the server's log says why",
                        entry.name
                    );
                    return Err(ApiError::internal(what));
                }
            }
        }
    }

    /// Unloads the unused model whose last request is the oldest; false if all are in use.
    fn unload_idle(&self) -> bool {
        let model = {
            let mut states = self.states();
            // No model is handed out meanwhile.
            let idle = |i: &usize| {
                let model = &states.loaded[*i].0;
                model.as_ref().is_some_and(|m| !ServedModel::is_in_use(m))
                    && self.entries[*i].can_go()
            };
            let all = 0..states.loaded.len();
            let oldest = all.filter(idle).min_by_key(|&i| states.loaded[i].1);
            oldest.and_then(|i| states.loaded[i].0.take())
        };
        if let Some(model) = &model {
            model.engine().close(Duration::ZERO);
        }
        model.is_some()
    }

    /// Unloads the models that nobody has used for `idle`; their next requests load them again.
    pub fn unload_unused(&self, idle: Duration) {
        let mut gone = Vec::new();
        {
            let mut states = self.states();
            let states = &mut *states;
            let both = states.loaded.iter_mut().zip(&mut states.used);
            for (entry, ((model, _), used)) in self.entries.iter().zip(both) {
                match model {
                    Some(model) if ServedModel::is_in_use(model) => *used = Instant::now(),
                    Some(_) if entry.can_go() && used.elapsed() >= idle => {
                        gone.extend(model.take());
                    }
                    _ => {}
                }
            }
        }
        for model in gone {
            model.engine().close(Duration::ZERO);
        }
    }

    fn no_room(&self, name: &str, needed: u64, free: u64) -> ApiError {
        let loaded = self.each(|l| l.model.map(|_| l.name.to_owned()));
        let loaded: Vec<String> = loaded.into_iter().flatten().collect();
        let (others, busy) = match loaded.as_slice() {
            [] => ("no other model is loaded".to_owned(), false),
            names => (
                format!("what is loaded is in use or pinned: {}", names.join(", ")),
                true,
            ),
        };
        let what = format!(
            "{name} is not loaded: it needs {} of memory, {} are free, and {others}",
            human_bytes(needed),
            human_bytes(free)
        );
        ApiError::no_memory(what, busy)
    }

    /// False if a loaded model no longer responds.
    pub fn is_healthy(&self) -> bool {
        let healthy = self.each(|l| l.model.is_none_or(|m| m.engine().is_healthy()));
        !self.states().closed && healthy.into_iter().all(|h| h)
    }

    /// The state of all models, then the metrics of the loaded ones.
    pub fn metrics(&self) -> String {
        let all = self.each(|listed| {
            let metrics = listed.model.map(|m| m.engine().metrics().text());
            (listed.name.to_owned(), states(&listed), metrics)
        });
        let loaded = all
            .iter()
            .filter_map(|(n, _, m)| Some((n.clone(), m.clone()?)));
        let states: Vec<_> = all.iter().map(|(n, s, _)| (n.clone(), s.clone())).collect();
        let both = [
            metrics::together(&states),
            metrics::together(&loaded.collect::<Vec<_>>()),
        ];
        both.concat().replacen("# EOF\n", "", 1)
    }

    /// Loads no more models and closes the loaded ones: see [`crate::Engine::close`].
    pub fn close(&self, grace: Duration) {
        let models: Vec<Arc<ServedModel>> = {
            let mut states = self.states();
            states.closed = true;
            let loaded = states.loaded.iter_mut();
            loaded.filter_map(|(model, _)| model.take()).collect()
        };
        std::thread::scope(|scope| {
            for model in &models {
                scope.spawn(|| model.engine().close(grace));
            }
        });
    }
}

/// A model's state as metrics, like those of its engine.
fn states(listed: &Listed<'_>) -> String {
    let about = listed.about;
    #[rustfmt::skip]
    let samples = [
        ("loaded", "gauge", "1 while it is in memory", f64::from(listed.model.is_some())),
        ("pinned", "gauge", "1 if it stays once it is loaded", f64::from(listed.pinned)),
        ("idle_seconds", "gauge", "Time since it was last used", listed.idle.as_secs_f64()),
        ("loads", "counter", "How often it was loaded", listed.loads as f64),
        ("context_tokens", "gauge", "Most tokens of a sequence", about.map_or(0.0, |a| a.context as f64)),
        ("bits_per_weight", "gauge", "Bits of a stored weight on average", about.map_or(0.0, |a| a.bits_per_weight)),
    ];
    let text = samples.map(|(name, kind, help, value)| {
        let total = if kind == "counter" { "_total" } else { "" };
        format!(
            "# HELP nq_model_{name} {help}.\n# TYPE nq_model_{name} {kind}\nnq_model_{name}{total} {value}\n"
        )
    });
    text.concat()
}
