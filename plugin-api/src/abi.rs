//! The types that cross the boundary between host and plugin. Hosts use this module. Authors of plugins do not.
//!
//! Every name in here, fields and parameters included, is part of the contract. Below 1.0 a change bumps the minor
//! version, and every plugin must be rebuilt. From 1.0 on methods and root fields are only appended.

mod difference;
mod guard;
mod guarded_allocator;
mod guarded_tier;
mod root;
pub mod services;

pub use abi_stable::std_types::{ROption, RResult, RSlice, RSliceMut, RStr, RString, RVec};
pub use guard::{check_guarded, open_guarded};
pub use guarded_allocator::open_guarded_allocator;
pub use guarded_tier::open_guarded_tier;
pub use root::{
    CheckConfig, HeaderError, OpenAllocator, OpenTier, OpenTransfer, PluginRoot, PluginRoot_Ref, Roles, Root,
    root_header,
};

use abi_stable::StableAbi;
use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::RBox;

use crate::allocator::{Component, ComponentId, PoolPage};
use crate::error::{Error, ErrorCode};
use crate::tier::{Key, Scanned, TierCompletion, TierLimits, TierPage, TierUsage};
use crate::transfer::{
    Completion, Memory, Notification, PeerId, RegionId, Submission, Tag, TransferLimits, Write,
};

/// [`Error`] as it crosses.
#[repr(C)]
#[derive(Clone, Debug, StableAbi)]
pub struct AbiError {
    /// What programs act on.
    pub code: ErrorCode,
    /// What people act on.
    pub message: RString,
}

impl From<Error> for AbiError {
    fn from(error: Error) -> Self {
        Self { code: error.code, message: error.message.into() }
    }
}

impl From<AbiError> for Error {
    fn from(error: AbiError) -> Self {
        Self { code: error.code, message: error.message.into() }
    }
}

/// A result as it crosses.
pub type AbiResult<T> = RResult<T, AbiError>;

/// The transfer role as it crosses. Each method corresponds to the method of the same name in
/// [`TransferBackend`](crate::TransferBackend).
#[abi_stable::sabi_trait]
pub trait TransferRole: Send + Sync + 'static {
    /// See [`TransferBackend::limits`](crate::TransferBackend::limits).
    fn limits(&self) -> TransferLimits;
    /// See [`TransferBackend::register`](crate::TransferBackend::register).
    fn register(&self, memory: &Memory) -> AbiResult<RegionId>;
    /// See [`TransferBackend::deregister`](crate::TransferBackend::deregister).
    fn deregister(&self, region: RegionId) -> AbiResult<()>;
    /// See [`TransferBackend::endpoint`](crate::TransferBackend::endpoint).
    fn endpoint(&self) -> AbiResult<RVec<u8>>;
    /// See [`TransferBackend::connect`](crate::TransferBackend::connect).
    fn connect(&self, name: RStr<'_>, endpoint: RSlice<'_, u8>) -> AbiResult<PeerId>;
    /// See [`TransferBackend::disconnect`](crate::TransferBackend::disconnect).
    fn disconnect(&self, peer: PeerId) -> AbiResult<()>;
    /// See [`TransferBackend::submit`](crate::TransferBackend::submit).
    fn submit(&self, submission: &Submission, writes: RSlice<'_, Write>) -> i32;
    /// See [`TransferBackend::poll`](crate::TransferBackend::poll).
    fn poll(&self, completions: RSliceMut<'_, Completion>) -> i32;
    /// See [`TransferBackend::notifications`](crate::TransferBackend::notifications).
    fn notifications(&self, notifications: RSliceMut<'_, Notification>) -> i32;
    /// See [`TransferBackend::cancel`](crate::TransferBackend::cancel).
    fn cancel(&self, tag: Tag) -> i32;
    /// See [`TransferBackend::settled`](crate::TransferBackend::settled).
    fn settled(&self, tag: Tag) -> i32;
    /// See [`TransferBackend::event_fd`](crate::TransferBackend::event_fd).
    fn event_fd(&self) -> i32;
    /// See [`TransferBackend::shutdown`](crate::TransferBackend::shutdown).
    #[sabi(last_prefix_field)]
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;
}

/// A transfer backend on the other side of the boundary.
pub type TransferObject = TransferRole_TO<RBox<()>>;

/// Wraps a role that the host itself implements, for a backend that the host reaches in another way than this ABI.
pub fn transfer_object(role: impl TransferRole) -> TransferObject {
    TransferRole_TO::from_value(role, TD_Opaque)
}

/// The storage role as it crosses. Each method corresponds to the method of the same name in
/// [`StorageTier`](crate::StorageTier).
#[abi_stable::sabi_trait]
pub trait TierRole: Send + Sync + 'static {
    /// See [`StorageTier::limits`](crate::StorageTier::limits).
    fn limits(&self) -> TierLimits;
    /// See [`StorageTier::register`](crate::StorageTier::register).
    fn register(&self, memory: &Memory) -> AbiResult<RegionId>;
    /// See [`StorageTier::deregister`](crate::StorageTier::deregister).
    fn deregister(&self, region: RegionId) -> AbiResult<()>;
    /// See [`StorageTier::exists`](crate::StorageTier::exists).
    fn exists(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32;
    /// See [`StorageTier::get`](crate::StorageTier::get).
    fn get(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32;
    /// See [`StorageTier::put`](crate::StorageTier::put).
    fn put(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32;
    /// See [`StorageTier::delete`](crate::StorageTier::delete).
    fn delete(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32;
    /// See [`StorageTier::poll`](crate::StorageTier::poll).
    fn poll(&self, completions: RSliceMut<'_, TierCompletion>) -> i32;
    /// See [`StorageTier::cancel`](crate::StorageTier::cancel).
    fn cancel(&self, tag: Tag) -> i32;
    /// See [`StorageTier::settled`](crate::StorageTier::settled).
    fn settled(&self, tag: Tag) -> i32;
    /// See [`StorageTier::scan`](crate::StorageTier::scan).
    fn scan(&self, cursor: u64, keys: RSliceMut<'_, Key>) -> AbiResult<Scanned>;
    /// See [`StorageTier::usage`](crate::StorageTier::usage).
    fn usage(&self) -> AbiResult<TierUsage>;
    /// See [`StorageTier::event_fd`](crate::StorageTier::event_fd).
    fn event_fd(&self) -> i32;
    /// See [`StorageTier::shutdown`](crate::StorageTier::shutdown).
    #[sabi(last_prefix_field)]
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;
}

/// A storage tier on the other side of the boundary.
pub type TierObject = TierRole_TO<RBox<()>>;

/// See [`transfer_object`].
pub fn tier_object(role: impl TierRole) -> TierObject {
    TierRole_TO::from_value(role, TD_Opaque)
}

/// The allocator role as it crosses. Each method corresponds to the method of the same name in
/// [`PoolAllocator`](crate::PoolAllocator).
#[abi_stable::sabi_trait]
pub trait AllocatorRole: Send + Sync + 'static {
    /// See [`PoolAllocator::components`](crate::PoolAllocator::components).
    fn components(&self, components: RSliceMut<'_, Component>) -> i32;
    /// See [`PoolAllocator::alloc`](crate::PoolAllocator::alloc).
    fn alloc(&self, component: ComponentId, pages: RSliceMut<'_, PoolPage>) -> i32;
    /// See [`PoolAllocator::free`](crate::PoolAllocator::free).
    #[sabi(last_prefix_field)]
    fn free(&self, component: ComponentId, pages: RSlice<'_, PoolPage>) -> i32;
}

/// A pool allocator on the other side of the boundary.
pub type AllocatorObject = AllocatorRole_TO<RBox<()>>;

/// See [`transfer_object`].
pub fn allocator_object(role: impl AllocatorRole) -> AllocatorObject {
    AllocatorRole_TO::from_value(role, TD_Opaque)
}
