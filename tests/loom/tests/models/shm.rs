//! Shared memory between two instances: fences, the ring of notifications, regions that come and go.

use std::time::{Duration, Instant};

use host_loom::control::{ControlPage, DevicePage, Line, MAX_COPY_THREADS};
use host_loom::inbound::Inbound;
use host_loom::live::{LiveTable, Places};
use host_loom::mapping::SharedPage;
use host_loom::pages::Pages;
use host_plugin_api::{NOTIFICATION_BYTES, NotificationKind};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::model::every_order;

/// A deadline that no model reaches.
fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// Memory that a peer writes. Loom fails a model in which two threads touch it unordered.
#[derive(Default)]
struct Memory(UnsafeCell<u64>);

// SAFETY: loom fails a model in which two threads access the memory unordered.
unsafe impl Sync for Memory {}

impl Memory {
    fn write(&self, value: u64) {
        // SAFETY: as above.
        self.0.with_mut(|memory| unsafe { *memory = value });
    }

    fn read(&self) -> u64 {
        // SAFETY: as above.
        self.0.with(|memory| unsafe { *memory })
    }
}

fn page() -> Arc<ControlPage> {
    Arc::new(ControlPage::default())
}

#[test]
fn nothing_lands_after_a_fence() {
    every_order(|| {
        let (page, memory) = (page(), Arc::new(Memory::default()));
        let copier = {
            let (page, memory) = (page.clone(), memory.clone());
            thread::spawn(move || {
                // Two pieces: the second may begin while the fence waits for the first.
                for piece in 1..3 {
                    let _busy = page.enter(0);
                    if !page.is_open() {
                        return;
                    }
                    memory.write(piece);
                }
            })
        };
        page.close();
        assert!(page.wait(deadline(), || false));
        // The receiver reuses the page.
        memory.write(9);
        copier.join().unwrap();
        assert_eq!(memory.read(), 9);
    });
}

#[test]
fn a_fence_waits_for_all_copy_threads() {
    every_order(|| {
        let page = page();
        let memory: [Arc<Memory>; 2] = Default::default();
        let copiers: Vec<_> = (0..2)
            .map(|number: usize| {
                let (page, memory) = (page.clone(), memory[number].clone());
                thread::spawn(move || {
                    let _busy = page.enter(number);
                    if page.is_open() {
                        memory.write(1);
                    }
                })
            })
            .collect();
        page.close();
        assert!(page.wait(deadline(), || false));
        memory.iter().for_each(|memory| memory.write(9));
        copiers.into_iter().for_each(|copier| copier.join().unwrap());
    });
}

#[test]
fn a_fence_waits_for_batches_of_devices_whose_lines_are_on_another_page_than_the_gate() {
    every_order(|| {
        let device = SharedPage(Arc::new(DevicePage::default()));
        let pages = Arc::new(Pages { control: SharedPage(page()), device: Some(device) });
        let memory = Arc::new(Memory::default());
        let copier = {
            let (pages, memory) = (pages.clone(), memory.clone());
            thread::spawn(move || {
                let Ok(busy) = pages.enter(MAX_COPY_THREADS) else { return };
                // The batch is in flight: the line stays busy until `leave`.
                std::mem::forget(busy);
                memory.write(1);
                pages.leave(MAX_COPY_THREADS);
            })
        };
        pages.control.close();
        assert!(pages.wait(deadline(), || false));
        memory.write(9);
        copier.join().unwrap();
        assert!(pages.devices_are_done());
    });
}

#[test]
fn a_notification_brings_its_data_and_the_ring_its_order() {
    every_order(|| {
        let page = page();
        let data: Arc<[Memory; 3]> = Arc::default();
        let sender = {
            let (page, data) = (page.clone(), data.clone());
            thread::spawn(move || {
                for (number, data) in data.iter().enumerate() {
                    data.write(number as u64 + 7);
                    // The ring has two places.
                    while !page.push(&[number as u8; NOTIFICATION_BYTES], 1) {
                        thread::yield_now();
                    }
                }
            })
        };
        for (number, data) in data.iter().enumerate() {
            let (bytes, length) = loop {
                if let Some(found) = page.take() {
                    break found;
                }
                thread::yield_now();
            };
            assert_eq!((bytes, length), ([number as u8; NOTIFICATION_BYTES], 1));
            assert_eq!(data.read(), number as u64 + 7);
        }
        assert!(!page.has_waiting());
        sender.join().unwrap();
    });
}

#[test]
fn what_was_pushed_before_a_connection_ended_is_told_before_its_end() {
    every_order(|| {
        let page = page();
        let socket = std::fs::File::open("/dev/null").unwrap().into();
        let pages = Pages { control: SharedPage(page.clone()), device: None };
        let inbound = Arc::new(Inbound::new([0; 16], "peer".into(), (socket, None), pages));
        let ended = {
            let inbound = inbound.clone();
            thread::spawn(move || {
                assert!(page.push(&[1; NOTIFICATION_BYTES], 1));
                // The sender closes its socket, and the service thread sees it.
                inbound.set_lost();
            })
        };
        let mut told = Vec::new();
        while told.len() < 2 {
            match inbound.take() {
                Some(notification) => told.push(notification.kind),
                None => thread::yield_now(),
            }
        }
        assert_eq!(told, [NotificationKind::ARRIVED, NotificationKind::PEER_LOST]);
        assert!(inbound.take().is_none());
        ended.join().unwrap();
    });
}

/// An instance's side of a copy: its own line, and the table of its regions.
struct Own {
    line: Line,
    live: LiveTable<2>,
    places: Places<2>,
    memory: [Memory; 2],
}

#[test]
fn a_region_that_is_taken_back_is_read_by_no_copy_and_never_mistaken_for_the_next() {
    every_order(|| {
        let own = Arc::new(Own {
            line: Line::default(),
            live: LiveTable::default(),
            places: Places::default(),
            memory: Default::default(),
        });
        // Ids 2 and 4 belong to one slot. The index of a memory stands for its address.
        own.places.set(2, 0, 8);
        own.live.set(2, 1);
        let copier = {
            let own = own.clone();
            thread::spawn(move || {
                for (id, memory) in [(2, 0), (4, 1)] {
                    let _busy = own.line.enter();
                    if let Some(address) = own.places.find(&own.live, id, 0, 8) {
                        assert_eq!(address, memory, "region {id}");
                        own.memory[address as usize].read();
                    }
                }
            })
        };
        own.live.clear(2);
        assert!(own.line.wait(deadline(), || false));
        // This write stands for unmapping the region. Then another region takes the slot.
        own.memory[0].write(9);
        own.memory[1].write(5);
        own.places.set(4, 1, 8);
        own.live.set(4, 1);
        copier.join().unwrap();
        assert!(own.live.lives(4, 1) && !own.live.lives(2, 1));
    });
}
