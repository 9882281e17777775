//! Runs the process that the settings describe, until it must stop.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use host_core::Event;
use host_front::front::{self, About, FrontConfig, HttpListeners};
use host_front::router::Retry;
use host_front::text::TextModel;
use host_memory::heap::keep_little;
use host_wire::audit::{AUDIT, REQUEST};
use host_wire::endpoint::{self, Address, Credentials, ListenAt, Listener, SocketDirectory};
use host_wire::proto::worker_server::WorkerServer;
use host_worker::metrics;
use host_worker::peers::Peers;
use host_worker::registration::Registrations;
use host_worker::service::WorkerService;
use host_worker::{Handle, Unwritten, Worker};
use tokio::sync::watch;
use tonic::service::Routes;
use tracing::{Level, Metadata};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

use super::addresses::Control;
use super::clients::{self, Clients};
use super::process_end::{StopSignals, end_at_once};
use super::settings::{LogFormat, RoleName, Settings};
use super::{
    Refused, Told, addresses, is_refusal, launch, lifeline, listeners, plugins, summary, supervise, watchdog,
};

/// Limit of the time for a worker's threads and plugins to end. It is longer than a plugin's own deadline.
const WORKER_STOP: Duration = Duration::from_secs(5);
/// Least time for the ends of answers to be read, which are on their way.
const HANG_UP: Duration = Duration::from_secs(1);
/// The share of the drain's time that they have at most. A frozen router never reads them.
const HANG_UP_SHARE: u32 = 4;
/// Largest control message: a prompt of a few million tokens.
const LARGEST_MESSAGE: usize = 32 << 20;

/// Runs until the process must stop.
///
/// # Errors
/// [`Refused`] when the configuration cannot work, another error when a step fails.
pub fn run(settings: Settings) -> anyhow::Result<()> {
    start_logging(&settings)?;
    let plugins::Resolved { settings, notes, supplied } = plugins::resolve(settings)?;
    if settings.start_companion.is_some() && settings.role.is_some() && !settings.supervised {
        let message = "--start-companion is for the process that starts all parts: leave --role out, or start the companion yourself";
        return Err(Refused(message.to_owned()).into());
    }
    if settings.supervised {
        // The supervisor starts this program through a descriptor. Without this call, `ps` and `top` would show the descriptor's
        // number as its name.
        rustix::thread::set_name(c"host").context("this process cannot be named")?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("control")
        .worker_threads(2)
        .build()
        .context("no threads for the control plane")?;
    let handle = runtime.handle().clone();
    let result = runtime.block_on(async {
        match settings.role {
            None => {
                plugins::check_all(&settings)?;
                let clients = clients::clients(&settings)?;
                launch::text_model(&settings)?;
                summary::log(&settings, &notes);
                supervise::run(&settings, &clients, &supplied).await
            }
            Some(RoleName::Router) => {
                if !settings.supervised {
                    plugins::check(&settings)?;
                }
                keep_little();
                route(&settings, stop_signal(settings.supervised)?).await
            }
            Some(role) => {
                // The supervisor has done the same checks, and reading a large model twice takes time.
                if !settings.supervised {
                    plugins::check_all(&settings)?;
                    summary::log(&settings, &notes);
                }
                if role == RoleName::Aggregated && settings.router.is_none() {
                    if let Some(flag) = addresses::of_a_cluster(&settings) {
                        let message =
                            format!("{flag} needs --router: without one this process is the whole server");
                        return Err(Refused(message).into());
                    }
                    keep_little();
                    return watchdog::beside(&settings, aggregated(&settings, &handle)).await;
                }
                if !settings.supervised {
                    clients::check_none(&settings)?;
                }
                let (control, routers) = addresses::check_worker(&settings)?;
                let stopped = stop_signal(settings.supervised)?;
                let worker = work(&settings, role, control, routers, &handle, stopped);
                watchdog::beside(&settings, worker).await
            }
        }
    });
    // The process must end even if a plugin never returns from a call.
    runtime.shutdown_timeout(Duration::from_secs(1));
    match result {
        // Several children may find the same error, so only the supervisor prints it.
        Err(error)
            if settings.supervised && is_refusal(&error) && lifeline::tell_refused(&format!("{error:#}")) =>
        {
            Err(Told.into())
        }
        result => result,
    }
}

/// The filter of log lines. Lines of the audit log are logged at every level but `off`, unless the operator's filter names them.
///
/// # Errors
/// When `asked`, the value of `--log-level`, is no filter.
fn log_filter(asked: Option<&str>) -> Result<EnvFilter, Refused> {
    let asked = asked.unwrap_or("info");
    // Libraries log each frame of each connection at these levels. A filter that names them shows these lines.
    let filter = match asked {
        level @ ("debug" | "trace") => format!("info,host={level}"),
        _ => asked.to_owned(),
    };
    let parsed = |filter: &str| {
        EnvFilter::try_new(filter)
            .map_err(|error| Refused(format!("--log-level {asked:?} is not a filter: {error}")))
    };
    let as_asked = parsed(&filter)?;
    if asked.eq_ignore_ascii_case("off") {
        return Ok(as_asked);
    }
    let names_audit = filter.split(',').any(|directive| directive.trim().split('=').next() == Some(AUDIT));
    let audit = if names_audit { String::new() } else { format!(",{AUDIT}=info,{REQUEST}=info") };
    parsed(&format!("{filter}{audit}"))
}

fn start_logging(settings: &Settings) -> Result<(), Refused> {
    let filter = log_filter(settings.log_level.as_deref())?;
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match settings.log_format {
        Some(LogFormat::Json) => lines.json().boxed(),
        _ => lines.with_target(false).with_ansi(std::io::stderr().is_terminal()).boxed(),
    };
    // A separate filter, because a directive of the operator may be more specific than any directive added to it.
    let lines = lines.with_filter(filter_fn(shows_no_prompt));
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(())
}

/// Whether lines of this kind have no characters of prompts. `tokenizers` logs each character of a prompt at level trace.
fn shows_no_prompt(of: &Metadata<'_>) -> bool {
    !of.target().starts_with("tokenizers") || *of.level() <= Level::WARN
}

/// Becomes true when the process must stop. A second signal ends the process at once. A supervised process stops when its standard
/// input closes, and ignores signals, because the supervisor knows the order in which processes must end.
fn stop_signal(supervised: bool) -> anyhow::Result<watch::Receiver<bool>> {
    let mut signals = StopSignals::listen().context("signals cannot be heard")?;
    let (stop, stopped) = watch::channel(false);
    let ended = stop.clone();
    if supervised {
        std::thread::spawn(move || {
            lifeline::wait_for_end();
            ended.send_replace(true);
        });
    }
    tokio::spawn(async move {
        loop {
            let signal = signals.next().await;
            if supervised {
                tracing::debug!(signal, "left to the supervisor");
            } else if stop.send_replace(true) {
                tracing::warn!(signal, "the second signal: ending at once");
                end_at_once();
            } else {
                tracing::info!(signal, "stopping; another signal ends this process at once");
            }
        }
    });
    Ok(stopped)
}

async fn until(mut stopped: watch::Receiver<bool>) {
    // The sender lives as long as the process.
    drop(stopped.wait_for(|stop| *stop).await);
}

async fn listen_control(control: Control) -> anyhow::Result<Listener> {
    let Control { at, credentials } = control;
    let bound = Listener::bind(&at, credentials).await;
    bound.map_err(|error| Refused(format!("cannot listen on {at}: {error}; change --control")).into())
}

fn front_config(settings: &Settings, clients: Clients, text: TextModel) -> FrontConfig {
    let standard = FrontConfig::new(settings.model_name(), text);
    let default_max_tokens = settings.default_max_tokens.unwrap_or(standard.default_max_tokens);
    let policy = settings.router_policy.map_or(standard.policy, Into::into);
    let max_requests = settings.max_requests.map_or(standard.max_requests, |most| most as usize);
    let Clients { keys, tenant_header, hosts, origins, tls, operators: _, limits } = clients;
    let drain = settings.drain_timeout();
    let retry = Retry {
        resume: !settings.no_resume,
        longest: settings.request_timeout(),
        total: settings
            .retry_timeout
            .map_or(standard.retry.total, |seconds| Duration::from_secs(seconds.into())),
        ..standard.retry
    };
    limits.of_front(FrontConfig {
        aliases: settings.model_aliases(),
        drain,
        retry,
        warm_up: !settings.no_warm_up,
        default_max_tokens,
        policy,
        max_requests,
        keys,
        tenant_header,
        hosts,
        origins,
        about: about(settings, standard.about.clone()),
        log_requests: !settings.no_request_log,
        stream_keep_alive: settings.stream_keep_alive.map(|seconds| Duration::from_secs(seconds.into())),
        tls,
        ..standard
    })
}

/// Information about the model for clients.
fn about(settings: &Settings, standard: About) -> About {
    let path = |path: &std::path::Path| {
        std::path::absolute(path).unwrap_or_else(|_unknown| path.to_owned()).display().to_string()
    };
    let model = settings.model.as_deref();
    // The synthetic executor has no model file.
    let made = model.and_then(|model| std::fs::metadata(model).ok()?.modified().ok());
    let made = made.and_then(|made| Some(made.duration_since(std::time::UNIX_EPOCH).ok()?.as_secs()));
    About {
        created: made.unwrap_or(standard.created),
        model_path: model.map(path),
        tokenizer_path: settings.tokenizer.as_deref().map(path),
    }
}

async fn route(settings: &Settings, stopped: watch::Receiver<bool>) -> anyhow::Result<()> {
    launch::check_router(settings)?;
    let clients = clients::clients(settings)?;
    let (http, control) = match settings.listen_fds.as_deref() {
        Some(numbers) => listeners::inherited(numbers, &clients)?,
        None => {
            let control = listen_control(Control::of_router(settings)?).await?;
            let http = listeners::listen(settings, &clients).await?;
            let url = served_at(&http, &clients)?;
            println!(
                "host: serving {} on {url}, workers register at {}",
                settings.model_name(),
                control.address()?
            );
            (http, control)
        }
    };
    let config = front_config(settings, clients, launch::text_model(settings)?);
    if settings.supervised {
        let ready = config.ready.subscribe();
        tokio::spawn(async move {
            until(ready).await;
            lifeline::tell_ready();
        });
    }
    front::serve(config, http, control, until(stopped)).await
}

/// Returns the URL for clients, and prints the one for operators.
fn served_at(http: &HttpListeners, clients: &Clients) -> anyhow::Result<String> {
    if let Some(operators) = &http.operators {
        listeners::say_operators(&operators.to_string());
    }
    Ok(listeners::url(http.clients.local_addr()?, clients.tls.is_some()))
}

/// A worker and its own router in one process.
async fn aggregated(settings: &Settings, runtime: &tokio::runtime::Handle) -> anyhow::Result<()> {
    let clients = clients::clients(settings)?;
    let text = launch::text_model(settings)?;
    let http = listeners::listen(settings, &clients).await?;
    // Both ends of the control connections are in this process. Other users of the machine cannot reach them.
    let sockets = SocketDirectory::new()?;
    let of =
        |name: &str| Control { at: ListenAt::Unix(sockets.socket(name)), credentials: Credentials::SameUser };
    let control = listen_control(of("router")).await?;
    let routers = vec![control.address()?];
    let url = served_at(&http, &clients)?;
    println!("host: serving {} on {url} (Ctrl-C ends it)", settings.model_name());
    let config = front_config(settings, clients, text);
    let stopped = stop_signal(settings.supervised)?;
    let (drained, worker_stopped) = watch::channel(false);
    let (worker_ended, front_stopped) = watch::channel(false);
    let front = async {
        let stop = async {
            tokio::select! { () = until(stopped) => {}, () = until(front_stopped) => {} }
        };
        let result = front::serve(config, http, control, stop).await;
        drained.send_replace(true);
        result
    };
    let worker = async {
        let of = of("aggregated-0");
        let result = work(settings, RoleName::Aggregated, of, routers, runtime, worker_stopped).await;
        // Without its worker the router could only refuse requests, so it ends, too.
        worker_ended.send_replace(true);
        result
    };
    tokio::try_join!(front, worker).map(|_both| ())
}

/// The listener for `/metrics` and `/health` in plain text, if `--metrics` is set or the control plane has credentials. Monitoring
/// programs have no certificate, and may run as other users.
async fn watch_at(settings: &Settings, credentials: &Credentials) -> anyhow::Result<Option<Listener>> {
    let at = match (settings.metrics, credentials) {
        (None, Credentials::None) => return Ok(None),
        (given, _) => given.map_or_else(ListenAt::loopback, ListenAt::Tcp),
    };
    let bound = Listener::bind(&at, Credentials::None).await;
    let bound =
        bound.map_err(|error| Refused(format!("cannot listen on {at}: {error}; change --metrics")))?;
    Ok(Some(bound))
}

/// Runs one worker that registers with its routers.
async fn work(
    settings: &Settings,
    role: RoleName,
    control: Control,
    routers: Vec<Address>,
    runtime: &tokio::runtime::Handle,
    stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let drain_timeout = settings.drain_timeout();
    let credentials = control.credentials.clone();
    let listener = listen_control(control).await?;
    let address = listener.address()?.to_string();
    let watched = watch_at(settings, &credentials).await?;
    let metrics = match &watched {
        Some(watched) => watched.address()?.to_string(),
        None => address.clone(),
    };
    let supervised = settings.supervised;
    let settings = settings.clone();
    // Loading weights takes seconds to minutes. A worker that must stop meanwhile does not wait for it.
    let loading = tokio::task::spawn_blocking(move || launch::parts(&settings, role));
    let parts = tokio::select! {
        parts = loading => parts.context("the worker could not be put together")??,
        () = until(stopped.clone()) => return Ok(()),
    };
    let (worker, outgoing) = Worker::start(parts, runtime)?;
    let handle = worker.handle().clone();
    let info = host_wire::proto::WorkerInfo { address, metrics, ..handle.info().clone() };
    tracing::info!(
        name = %info.name,
        instance = %handle.instance(),
        address = %info.address,
        metrics = %info.metrics,
        pages = info.pages,
        max_tokens = info.max_tokens,
        plugin = handle.links().plugin_name(),
        "worker ready"
    );
    let peers = Peers::new(handle.clone(), credentials.clone());
    let (drain_asked, asked) = watch::channel(false);
    let (close, closing) = watch::channel(false);
    let service =
        WorkerService::new(handle.clone(), info.clone(), peers.clone(), drain_asked, closing.clone());
    let service = WorkerServer::new(service).max_decoding_message_size(LARGEST_MESSAGE);
    let mut registrations = Registrations::start(&handle, &info, routers, &credentials)?;
    if supervised {
        let ready = registrations.readiness();
        tokio::spawn(async move {
            ready.until_ready().await;
            lifeline::tell_ready();
        });
    }
    let watching = metrics::routes(handle.clone(), peers.clone(), &info, registrations.readiness());
    let calls = Routes::new(service);
    tokio::spawn(peers.run(info.clone(), outgoing));
    let mut servers = tokio::task::JoinSet::new();
    match watched {
        Some(watched) => {
            servers.spawn(endpoint::serve(listener, calls, until(closing.clone())));
            servers.spawn(endpoint::serve_watched(watched, None, watching, until(closing)));
        }
        None => {
            servers.spawn(endpoint::serve_watched(listener, Some(calls), watching, until(closing)));
        }
    }

    tokio::select! {
        () = until(stopped) => {}
        () = until(asked) => tracing::info!("an operator asks this worker to drain"),
        thread = worker.died() => anyhow::bail!("the worker's {thread} thread has ended; see above"),
    }
    registrations.drain().await;
    let until = tokio::time::Instant::now() + drain_timeout;
    let all_ended = drain(&handle, until).await;
    close.send_replace(true);
    if all_ended {
        // The ends of answers may be on their way.
        let read = async { while servers.join_next().await.is_some() {} };
        let left = until.saturating_duration_since(tokio::time::Instant::now());
        let longest = left.min(drain_timeout / HANG_UP_SHARE).max(HANG_UP);
        if tokio::time::timeout(longest, read).await.is_err() {
            tracing::warn!("connections of routers or other workers did not end in time");
        }
    }
    registrations.leave().await;
    servers.abort_all();
    let stopping = tokio::task::spawn_blocking(move || worker.stop());
    match tokio::time::timeout(WORKER_STOP, stopping).await {
        Ok(stopped) => stopped.context("the worker could not be stopped")?,
        // A thread of the worker hangs in a call of the plugin that must not block. The process ends without this thread.
        Err(_elapsed) => anyhow::bail!("the worker did not stop within {} s", WORKER_STOP.as_secs()),
    }
}

/// Waits until requests under way have ended, their answers are read, and their pages are in storage, where the next process
/// finds them. Returns whether all requests have ended.
async fn drain(worker: &Handle, until: tokio::time::Instant) -> bool {
    let requests = || {
        let stats = worker.stats();
        worker.calls().max(stats.queued + stats.active)
    };
    let idle = async {
        worker.close().await;
        worker.event(Event::Drain).await;
        while requests() > 0 || worker.unwritten().iter().any(|tier| tier.pages > 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = tokio::time::timeout_at(until, idle).await.is_ok();
    let ended = in_time || requests() == 0;
    if !ended {
        tracing::warn!(
            requests = requests(),
            "requests did not end in time; routers go on with them elsewhere"
        );
    }
    for Unwritten { tier, pages } in worker.unwritten().into_iter().filter(|tier| tier.pages > 0) {
        tracing::warn!(
            tier,
            pages,
            "pages were not written to storage in time; the next life computes them again"
        );
    }
    ended
}
