//! Every plan played, every call run live, every fault provoked.
