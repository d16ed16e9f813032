"""Live delivery over WebRTC.

May import `rtgen.{config,errors,types,timing,frame_link}`; never torch.
"""
