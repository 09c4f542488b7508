from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: F401
